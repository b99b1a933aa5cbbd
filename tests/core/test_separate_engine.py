"""Engines on devices of their own: when they are paused, and what becomes of one that is lost."""

import pytest

from hybridrl.core.hybrid_engine import Mode, SeparateEngine
from hybridrl.core.rollout import ModeError
from hybridrl.core.training.worker import TrainWorker
from tests.core.test_hybrid_engine import Fleet, Ranks, Sync

SYNC = ["pause", "publish 1", "verify"]
TRAINING = ["policy and critic to the devices"]  # nothing moves: it is how memory is recorded


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def engine(calls) -> SeparateEngine:
    fleet = Fleet(calls)
    engine = SeparateEngine(Ranks(calls), fleet, Sync(calls, fleet), timeout=1.0)
    engine.pause = lambda: calls.append("pause")
    return engine


def test_engines_are_paused_for_the_weights_and_never_sleep(engine, calls):
    engine.to_rollout(1)
    engine.to_training()
    assert calls == SYNC + TRAINING
    assert engine.client.available, "they generate while the step trains"


def test_weights_that_the_engines_have_are_not_sent_again(engine, calls):
    engine.to_rollout(1)
    engine.to_training()
    calls.clear()
    engine.to_rollout(1)
    assert calls == ["pause"] and engine.mode is Mode.ROLLOUT


def test_trainers_are_not_called_while_they_must_keep_the_weights_of_the_engines(engine):
    engine.to_rollout(1)
    with pytest.raises(ModeError):
        engine.trainers.start(TrainWorker.layouts)


def test_a_server_that_is_lost_while_the_trainers_wait_gets_the_weights_at_once(engine, calls):
    engine.to_rollout(1)
    calls.clear()
    assert engine.fleet.revive(1) == "server 1"
    assert calls == ["rebuild 1", "restore 1", "verify 1"]


def test_one_that_is_lost_while_they_train_returns_with_the_next_weights(engine, calls):
    engine.to_rollout(0)
    engine.to_training()
    calls.clear()
    assert engine.fleet.revive(1) is None
    assert calls == ["rebuild 1"]
    engine.to_rollout(1)
    assert calls[1:] == [*SYNC, "replace 1"]
    calls.clear()
    engine.to_rollout(1)
    assert calls == ["pause"], "it is replaced once"


def test_it_gets_them_also_if_the_others_have_them(engine, calls):
    engine.to_rollout(1)
    engine.to_training()
    engine.fleet.revive(0)
    calls.clear()
    engine.to_rollout(1)
    assert calls == [*SYNC, "replace 0"]


def test_a_sync_in_which_a_server_dies_is_repeated_with_a_new_one_that_is_awake(engine, calls):
    engine.sync.fails = [1]
    engine.to_rollout(1)
    assert [call for call in calls if call not in TRAINING] == [
        *("pause", "publish 1", "kill [1]", "abort [1]"),
        *("rebuild 1", "replace 1", "publish 1", "verify"),
    ]

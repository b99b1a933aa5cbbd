"""The order of the switch and the mode check, with parts that record their calls."""

from types import SimpleNamespace
from typing import Any

import pytest

from hybridrl.core.cluster import Group, RemoteFailure, WorkerDied
from hybridrl.core.hybrid_engine import HybridEngine, Mode
from hybridrl.core.rollout import ModeError
from hybridrl.core.training.worker import TrainWorker


class Ranks(Group):
    """Two training ranks."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__(["r0", "r1"], "train worker", [])
        self.calls = calls

    def broadcast(self, method: Any, *args: Any, timeout: float, **kwargs: Any) -> list[dict[str, float]]:
        moved = " and ".join(name for key, name in (("actor", "policy"), ("others", "critic")) if kwargs.get(key, True))
        self.calls.append(f"{moved} to the {'host' if kwargs['to_host'] else 'devices'}")
        return [{"max_memory": 1.0}, {"max_memory": 2.0}]


class Fleet:
    """Two rollout servers; those in `dead` died."""

    def __init__(self, calls: list[str]) -> None:
        self.calls, self.dead, self.causes = calls, {}, []
        self.rollout = SimpleNamespace(request_retries=1, max_num_seqs=8)

    def __len__(self):
        return 2

    def client(self, revive):
        self.revive = revive
        return SimpleNamespace(
            restarts=0,
            retried={"died": 0, "silent": 2},
            replace=lambda index, server: self.calls.append(f"replace {index}"),
        )

    def handle(self, index):
        return f"server {index}"

    def sleep(self, *, kill_failed=False):
        self.calls.append("sleep")

    def wake(self, part):
        self.calls.append(f"wake {part}")

    def find_dead(self, silent=()):
        return self.dead | dict.fromkeys(silent, "it did not respond")

    def replace_all(self, reason):
        self.dead = {0: reason, 1: reason}

    def take_metrics(self):
        return {"rollout/preemptions": 4}

    def kill(self, indices):
        self.calls.append(f"kill {indices}")

    def note_death(self, index, cause):
        self.causes.append((index, cause))
        if "memory" in str(cause):
            self.rollout.max_num_seqs = 4

    def rebuild(self, index, *, asleep=False):
        self.dead.pop(index, None)
        self.calls.append(f"rebuild {index}{' asleep' if asleep else ''}")


class Sync:
    """Weights that arrive, unless a server dies: then it is in `fails`."""

    def __init__(self, calls: list[str], fleet: Fleet) -> None:
        self.calls, self.fleet, self.fails, self.silent, self.cause = calls, fleet, [], [], "it died"

    def publish(self, version):
        self.calls.append(f"publish {version}")
        if self.fails:
            self.fleet.dead = {self.fails.pop(): self.cause}
            raise RemoteFailure("rollout server.load_bucket: rank 1 failed")
        if self.silent:
            failure = WorkerDied("rollout server.load_bucket: no response from rollout-1 within 300 s")
            failure.silent = (self.silent.pop(),)
            raise failure

    def restore(self, index):
        self.calls.append(f"restore {index}")

    def verify(self, index=None):
        self.calls.append("verify" if index is None else f"verify {index}")

    def abort(self, dead):
        self.calls.append(f"abort {dead}")

    def take_metrics(self):
        return {"training/probe_log_prob_diff": 1e-6, "perf/weights_gb": 3.0}


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def engine(calls) -> HybridEngine:
    fleet = Fleet(calls)
    return HybridEngine(Ranks(calls), fleet, Sync(calls, fleet), timeout=1.0)


TO_ROLLOUT = ["critic to the host", "wake weights", "publish 3", "policy to the host", "wake kv_cache", "verify"]
TO_TRAINING = ["sleep", "policy and critic to the devices"]


def test_weights_are_published_before_the_policy_leaves_and_responses_are_available_once_the_cache_is_woken(
    engine, calls
):
    assert not engine.client.available
    engine.to_rollout(3)
    assert calls == TO_ROLLOUT and engine.mode is Mode.ROLLOUT and engine.client.available
    engine.to_training()
    assert calls == TO_ROLLOUT + TO_TRAINING and engine.mode is Mode.TRAINING and not engine.client.available


def test_the_present_mode_is_not_entered_again_and_another_version_is(engine, calls):
    engine.to_training()
    assert calls == []
    engine.to_rollout(2)
    calls.clear()
    engine.to_rollout(2)
    assert calls == []
    engine.to_rollout(3)
    assert calls == TO_TRAINING + TO_ROLLOUT


def test_ranks_are_not_called_in_rollout_mode_but_for_what_needs_no_device(engine):
    started = []

    class Rank:
        def __getattr__(self, name: str) -> SimpleNamespace:
            return SimpleNamespace(remote=lambda: started.append(name))

    engine.trainers.actors = [Rank()]
    engine.trainers.start(TrainWorker.forward)
    engine.to_rollout(0)
    with pytest.raises(ModeError, match="forward was called while the devices are in rollout mode; call to_training"):
        engine.trainers.start(TrainWorker.forward)
    with pytest.raises(ModeError, match="update_policy was called"):
        engine.trainers.start_each(TrainWorker.update_policy, [()])
    engine.trainers.start(TrainWorker.finished_save)
    assert started == ["forward", "finished_save"]


def test_a_server_that_died_asleep_is_rebuilt_before_the_weights_are_published(engine, calls):
    engine.fleet.dead = {1: "killed"}
    engine.to_rollout(3)
    rebuilt = ["policy and critic to the host", "rebuild 1 asleep", "replace 1", "policy and critic to the devices"]
    assert calls == rebuilt + TO_ROLLOUT


def test_servers_that_have_grown_are_rebuilt_before_the_next_weights_are_published(engine, calls):
    engine.to_rollout(3)
    engine.rebuild_servers()
    calls.clear()
    engine.to_rollout(4)
    assert [call for call in calls if "rebuild" in call] == ["rebuild 0 asleep", "rebuild 1 asleep"]
    assert calls.index("rebuild 1 asleep") < calls.index("publish 4") and engine.fleet.dead == {}


def test_a_server_that_dies_during_a_sync_is_killed_before_its_buckets_are_freed_and_all_is_sent_again(engine, calls):
    engine.sync.fails = [1]
    engine.to_rollout(3)
    failed = ["kill [1]", "abort [1]", "policy and critic to the host", *TO_TRAINING]
    rebuilt = ["policy and critic to the host", "rebuild 1 asleep", "replace 1", "policy and critic to the devices"]
    assert calls == [*TO_ROLLOUT[:3], *failed, *rebuilt, *TO_ROLLOUT]


def test_a_server_that_is_silent_during_a_sync_is_replaced_although_it_responds_to_checks(engine, calls, caplog):
    engine.sync.silent = [1]
    engine.fleet.kill = lambda indices: (calls.append(f"kill {indices}"), engine.fleet.dead.update({1: "silent"}))
    engine.to_rollout(3)
    assert calls.index("kill [1]") < calls.index("rebuild 1 asleep") < calls.index("verify")
    assert "the weight sync failed, and is repeated: rollout server.load_bucket: no response from" in caplog.text


def test_a_server_that_dies_of_memory_during_a_sync_is_known_before_it_is_killed_and_gets_fewer_requests(engine):
    engine.sync.fails = [1]
    engine.sync.cause = "the engine ran out of memory"
    engine.to_rollout(3)
    assert engine.fleet.causes[0] == (1, "the engine ran out of memory") and engine.client.capacity == 4


def test_a_sync_that_fails_too_often_or_without_a_death_ends_the_run(engine):
    engine.sync.fails = [0, 1]
    with pytest.raises(RemoteFailure):
        engine.to_rollout(3)
    engine.fleet.dead, engine.sync.fails = {}, [1]
    engine.fleet.find_dead = lambda silent=(): {}
    with pytest.raises(RemoteFailure):
        engine.to_rollout(3)
    assert engine.mode is Mode.TRAINING


def test_no_engine_is_woken_where_the_memory_is_not_enough_nor_after_one_has_died(engine, calls):
    def check() -> None:
        if "rebuild 1 asleep" in calls:
            raise MemoryError("a step needs more")

    engine.check_memory, engine.sync.fails = check, [1]
    with pytest.raises(MemoryError, match="a step needs more"):
        engine.to_rollout(3)
    assert calls.count("wake weights") == 1
    with pytest.raises(MemoryError):
        engine.to_rollout(3)
    assert calls.count("wake weights") == 1


def test_a_server_lost_while_generating_gets_the_same_weights(engine, calls):
    engine.to_rollout(3)
    calls.clear()
    assert engine.fleet.revive(1) == "server 1"
    assert calls == ["rebuild 1", "policy to the devices", "restore 1", "policy to the host", "verify 1"]


def test_metrics_are_seconds_memory_the_gap_the_rate_of_a_sync_the_engines_statistics_and_losses(engine):
    engine.to_rollout(0)
    metrics = engine.take_metrics()
    assert metrics.pop("perf/weights_gb_per_s") == 3.0 / metrics.pop("timing_s/update_weights")
    assert metrics.pop("timing_s/switch") >= 0 and metrics.pop("perf/process_memory_gb/driver") > 0.01
    assert metrics == {
        "perf/max_memory": 2.0,
        "training/probe_log_prob_diff": 1e-6,
        "perf/weights_gb": 3.0,
        "rollout/preemptions": 4,
        "rollout/engine_restarts": 0,
        "rollout/retried_requests/died": 0,
        "rollout/retried_requests/silent": 2,
    }

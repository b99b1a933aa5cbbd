"""Seeds, and which model's parameters are on the device when, with learners that only record calls."""

from types import SimpleNamespace
from typing import Any

import pytest

from hybridrl.core.algorithms.algorithm import loss_terms
from hybridrl.core.training.learner import Learner
from hybridrl.core.training.losses import LossConfig
from hybridrl.core.training.planning import training_seed
from hybridrl.core.training.worker import TrainWorker


class RecordingLearner(Learner):
    """A learner whose parameters may leave the device."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls, self.model = name, calls, object()

    def offload(self, *, to_host: bool) -> None:
        self.calls.append(f"{self.name} {'leaves' if to_host else 'arrives'}")

    def update(self, *_: Any, **__: Any) -> list:
        self.calls.append(f"{self.name} updates")
        return []


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def worker(calls: list[str]) -> TrainWorker:
    made = TrainWorker.__new__(TrainWorker)  # without an actor
    made.rank, made.config = 0, SimpleNamespace(seed=0, device="cpu")
    made.models = {"actor": RecordingLearner("policy", calls), "critic": RecordingLearner("critic", calls)}
    return made


def test_while_one_model_is_updated_the_other_is_offloaded(worker: TrainWorker, calls: list[str]) -> None:
    worker.update_critic(None, [], SimpleNamespace(grad_clip=1.0), 1)
    worker.update_policy(
        None,
        [],
        LossConfig(loss_terms("vanilla"), "token-mean", 1.0, 1.0, 1.0),
        1,
    )
    assert calls == [
        *("policy leaves", "critic arrives", "critic updates"),
        *("critic leaves", "policy arrives", "policy updates"),
    ]


def test_after_a_rollout_the_critic_returns_only_when_it_is_used(worker: TrainWorker, calls: list[str]) -> None:
    worker.offload(to_host=False)
    assert calls == ["critic leaves", "policy arrives"]


def test_before_the_weight_sync_only_the_critic_leaves(worker: TrainWorker, calls: list[str]) -> None:
    worker.offload(to_host=True, actor=False)
    assert calls == ["critic leaves"]


@pytest.mark.parametrize(
    ("keys", "seed"),
    [
        ((0, 1, 0), 2073067270),  # dropout of the first step on the first rank
        ((42, 3, 1), 292735539),  # the order of prompts in the third step's second epoch
        ((42, 100), 100974721),  # the selected tokens of a step
    ],
)
def test_seeds_are_the_same_with_every_python_so_that_resumed_runs_repeat_them(keys, seed):
    assert training_seed(*keys) == seed

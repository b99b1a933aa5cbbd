"""Which model's parameters are on the device when, with models that only note what is done with them."""

from types import SimpleNamespace
from typing import Any

import pytest

from hybridrl.training.losses import ValueLossConfig
from hybridrl.training.worker import TrainWorker

VALUE_LOSS = ValueLossConfig(clip=0.5, aggregation="token-mean", scale=1.0, grad_clip=1.0)


class NotedLearner:
    """A learner whose parameters may leave the device."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def offload(self, *, to_host: bool) -> None:
        self.notes.append(f"{self.name} {'leaves' if to_host else 'arrives'}")

    def update(self, *_: Any, **__: Any) -> list:
        self.notes.append(f"{self.name} learns")
        return []


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def worker(notes: list[str]) -> TrainWorker:
    made = TrainWorker.__new__(TrainWorker)  # without a process of its own
    made.rank, made.config = 0, SimpleNamespace(seed=0, device="cpu")
    made.policy, made.critic = NotedLearner("policy", notes), NotedLearner("critic", notes)
    return made


def test_while_one_model_learns_the_other_is_away(worker: TrainWorker, notes: list[str]) -> None:
    worker.update_critic(None, [], VALUE_LOSS, 1)
    worker.update_policy(
        None,
        [],
        SimpleNamespace(correction=None, entropy_coeff=0, own_old_log_probs=False, tell_entropy=False, grad_clip=1.0),
        1,
    )
    assert notes == [
        *("policy leaves", "critic arrives", "critic learns"),
        *("critic leaves", "policy arrives", "policy learns"),
    ]


def test_after_a_rollout_the_critic_returns_only_when_it_is_used(worker: TrainWorker, notes: list[str]) -> None:
    worker.offload(to_host=False)
    assert notes == ["critic leaves", "policy arrives"]


def test_before_the_weight_sync_only_the_critic_leaves(worker: TrainWorker, notes: list[str]) -> None:
    worker.offload(to_host=True, policy=False)
    assert notes == ["critic leaves"]

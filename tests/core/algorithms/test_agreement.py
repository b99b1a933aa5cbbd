"""Engine and trainer that disagree about the sampled tokens stop a run; what rounding makes does not."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hybridrl.core.algorithms import Algorithm
from hybridrl.core.algorithms.batch_metrics import Agreement, Disagreement
from hybridrl.core.batch import Batch
from hybridrl.core.training.worker_group import TrainWorkers

ROWS = torch.tensor([2, 2])


def answers(trainer: list[float], engine: list[float], written: Sequence[bool] = (True,) * 4) -> Batch:
    numbers = torch.arange(2)
    return Batch(
        prompt_lengths=torch.ones(2, dtype=torch.int64),
        response_lengths=ROWS,
        prompt_ids=torch.tensor([1, 1]),
        response_ids=torch.arange(4),
        group=numbers,
        position=numbers,
        sample=numbers,
        response_mask=torch.tensor(written),
        old_log_probs=torch.tensor(trainer),
        rollout_log_probs=torch.tensor(engine),
    )


def check(difference: list[float], limit: float = 0.01, written: tuple[bool, ...] = (True,) * 4) -> None:
    engine: Tensor = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    batch = answers((engine + torch.tensor(difference)).tolist(), engine.tolist(), written)
    Agreement(limit, "float32").check(batch)


def test_a_mean_difference_above_the_limit_stops_with_its_likely_causes_and_its_key() -> None:
    with pytest.raises(Disagreement, match=r"by 0\.02 on average.*float32 \(at most 0\.01\).*dropout") as caught:
        check([0.04, -0.04, 0.0, 0.0])
    assert "Set actor_rollout_ref.rollout.max_log_prob_gap higher" in str(caught.value)


def test_a_difference_within_the_limit_of_few_tokens_and_of_tokens_that_the_policy_did_not_write_passes() -> None:
    check([0.02, -0.01, 0.0, 0.0])
    check([0.0, 0.0, 0.0, 9.0], written=(True, True, True, False))
    check([0.04, -0.04, 0.0, 0.0], limit=0.03)


def test_numbers_that_are_not_finite_are_left_to_the_updates_which_skip_them() -> None:
    check([inf, 0.0, 0.0, 0.0])
    check([float("nan"), 1.0, 1.0, 1.0])


def test_without_the_log_probs_of_both_nothing_is_compared() -> None:
    batch = answers([0.0] * 4, [1.0] * 4)
    for name in ("old_log_probs", "rollout_log_probs"):
        Agreement(0.01, "float32").check(Batch(**{**vars(batch), name: None}))


class Workers(TrainWorkers):
    """Training ranks whose log-probs are not the engine's, computed before the update or by the update itself."""

    def __init__(self, before_update: bool) -> None:
        plan = SimpleNamespace(first_update=1, agreement=Agreement(0.2, "bfloat16"))
        self.policy, self.critic, self.before_update, self.updates = plan, None, before_update, 0
        self._seen = frozenset()

    def needs_old_log_probs(self, batch: Batch) -> bool:
        return self.before_update

    def forward_log_probs(self, batch: Batch) -> Batch:
        return replace(batch, old_log_probs=batch.rollout_log_probs + 1)

    def update_policy(self, batch: Batch, step: int) -> tuple[Batch, dict[str, float]]:
        self.updates += 1
        return self.forward_log_probs(batch), {}


@pytest.mark.parametrize(("before_update", "updates"), [(True, 0), (False, 1)])
def test_a_step_ends_where_they_disagree_before_the_update_if_it_is_known_then(before_update: bool, updates: int):
    workers = Workers(before_update)
    batch = replace(answers([0.0] * 4, [-1.0] * 4), old_log_probs=None)
    with pytest.raises(Disagreement, match="by 1 on average"):
        workers.update(workers.old_log_probs(batch, Algorithm(None), step=1), step=1)
    assert workers.updates == updates


def test_in_bypass_mode_the_engine_is_not_compared_with_itself() -> None:
    batch = replace(answers([0.0] * 4, [-1.0] * 4), old_log_probs=None)
    filled = Workers(before_update=True).old_log_probs(batch, Algorithm(None, bypass=True), step=1)
    assert torch.equal(filled.old_log_probs, batch.rollout_log_probs)


def test_before_the_first_update_of_the_policy_its_log_probs_are_not_computed() -> None:
    workers = Workers(before_update=True)
    workers.policy.first_update = 2
    batch = replace(answers([0.0] * 4, [-1.0] * 4), old_log_probs=None)
    assert workers.old_log_probs(batch, Algorithm(None), step=1).old_log_probs is None
    assert workers.update(batch, step=1) == (batch, {})
    assert workers.updates == 0

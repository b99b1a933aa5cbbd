"""Engine and trainer that disagree about the sampled tokens stop a run; what rounding makes does not."""

from dataclasses import replace
from math import inf
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hybridrl.algorithms.agreement import Agreement, Disagreement
from hybridrl.batch import Batch
from hybridrl.trainer import Schedule, Trainer

ROWS = torch.tensor([2, 2])


def answers(trainer: list[float], engine: list[float], written: list[bool]) -> Batch:
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
    Agreement(limit, "float32").check(
        answers((engine + torch.tensor(difference)).tolist(), engine.tolist(), list(written))
    )


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
    batch = answers([0.0] * 4, [1.0] * 4, [True] * 4)
    for name in ("old_log_probs", "rollout_log_probs"):
        Agreement(0.01, "float32").check(Batch(**{**vars(batch), name: None}))


class Workers:
    """Trainers whose log-probs are not the engine's, found in a pass of their own or in the update's."""

    def __init__(self, own_pass: bool) -> None:
        self.own_pass, self.updates = own_pass, 0

    def needs_old_log_probs(self, batch: Batch) -> bool:
        return self.own_pass

    def log_probs(self, batch: Batch, reference_kl: bool) -> Batch:
        return replace(batch, old_log_probs=batch.rollout_log_probs + 1)

    def update_policy(self, batch: Batch, step: int) -> tuple[Batch, dict[str, float]]:
        self.updates += 1
        return self.log_probs(batch, reference_kl=False), {}


@pytest.mark.parametrize(("own_pass", "updates"), [(True, 0), (False, 1)])
def test_a_step_ends_where_they_disagree_before_an_update_if_it_is_known_then(own_pass: bool, updates: int) -> None:
    algorithm = SimpleNamespace(
        needs_old_log_probs=False,
        needs_reference_kl=False,
        needs_reference_log_probs=False,
        bypass=False,
        uses_critic=False,
        advantages=lambda batch: (batch, {}),
    )
    batch = replace(answers([0.0] * 4, [-1.0] * 4, [True] * 4), old_log_probs=None)
    experience = SimpleNamespace(collect=lambda pool: SimpleNamespace(batch=batch, samples=[], metrics={}))
    engine = SimpleNamespace(to_rollout=lambda version: None, to_training=lambda: None, pool=None)
    schedule = Schedule(1, 0, validate_first=False, validate_only=False, agreement=Agreement(0.2, "bfloat16"))
    workers = Workers(own_pass)
    trainer = Trainer(algorithm, experience, engine, workers, None, None, SimpleNamespace(), None, schedule)
    with pytest.raises(Disagreement, match="by 1 on average"):
        trainer.train_step(1)
    assert workers.updates == updates

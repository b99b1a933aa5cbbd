"""Decisions of the driver about a step's updates, and its metrics from those of the ranks; without any rank."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hybridrl.core.algorithms.algorithm import Signal, loss_terms
from hybridrl.core.algorithms.rollout_correction import Rejection, RolloutCorrection
from hybridrl.core.batch import Batch
from hybridrl.core.carried import CONTEXT, CONTEXT_LENGTHS, PICTURE_DIGEST, PICTURE_START, PICTURES
from hybridrl.core.pictures import PixelRule
from hybridrl.core.training.learner import RankModel
from hybridrl.core.training.losses import LossConfig
from hybridrl.core.training.planning import MicroBatchBudget, UpdatePlan
from hybridrl.core.training.vision import VisionConfig
from hybridrl.core.training.worker_group import PolicyPlan, RankPlan, SplitEpisodes, TrainWorkers
from hybridrl.required import required

TOKEN = RolloutCorrection("token", None, 2.0, False, ())
SEQUENCE = RolloutCorrection("sequence", None, 2.0, False, ())
REJECTS = RolloutCorrection(None, None, 2.0, False, (Rejection("seq_sum_k1", 0.5, 2.0),))
BUDGET = MicroBatchBudget(100)


class Ranks:
    """Two ranks that answer every call with what they are given."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def __len__(self) -> int:
        return len(self.answers)

    def share(self, batch: Batch) -> Batch:
        return batch

    def scatter(self, method: Any, parts: list[Any], **options: Any) -> list[Any]:
        return self.answers


def workers_of(ranks: Ranks | None = None, in_update: RolloutCorrection | None = None, **loss: Any) -> TrainWorkers:
    terms = loss_terms(loss.pop("policy_loss", "vanilla"))
    policy_loss = LossConfig(terms, "token-mean", scale=1.0, temperature=1.0, grad_clip=1.0, **loss)
    plan = PolicyPlan(policy_loss, UpdatePlan(2, 1, 0, False, BUDGET), correction=in_update)
    models = {"actor": RankModel(None, None, BUDGET, reads=("routes",))}
    return TrainWorkers(ranks, RankPlan(models, plan), "float32", 1.0)


@pytest.mark.parametrize(("correction", "computed"), [(None, False), (TOKEN, False), (SEQUENCE, True)])
def test_old_log_probs_are_computed_first_if_an_episodes_weights_are_of_several_rows(make_batch, correction, computed):
    """An update computes them by micro-batch, in which the rows of an episode need not be together."""
    workers = workers_of(in_update=correction)
    assert not workers.needs_old_log_probs(make_batch([2, 3, 1], group=[0, 0, 1]))
    assert workers.needs_old_log_probs(make_batch([2, 3, 1], group=[0, 0, 1], episode=[0, 0, 1])) is computed


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ({"policy_loss": "gspo"}, "loss_mode=gspo compares whole responses"),
        ({"correction": SEQUENCE}, "rollout_correction with bypass_mode=true compares whole responses"),
        ({"correction": REJECTS}, "rollout_correction with bypass_mode=true compares whole responses"),
    ],
)
def test_a_loss_of_whole_responses_is_refused_for_an_episode_of_several_rows(make_batch, loss, said):
    batch = make_batch([2, 3], group=[0, 0], episode=[0, 0], old_log_probs=torch.zeros(5))
    with pytest.raises(SplitEpisodes, match=said):
        workers_of(**loss).update_policy(batch, step=1)


def test_metrics_are_means_over_updates_and_the_learning_rate_is_the_last_one(make_batch):
    """Shares of two ranks add up."""
    updates = [{"pg_loss": 1.0, "lr": 0.5e-3}, {"pg_loss": 2.0, "lr": 0.25e-3}]
    workers = workers_of(Ranks((updates, None), (updates, None)))
    batch = make_batch([2, 3], old_log_probs=torch.zeros(5))
    metrics, _ = workers.update_mini_batches(batch, [[0], [1]], workers.policy.loss, step=1)
    assert metrics["actor/pg_loss"] == 3.0
    assert metrics["actor/lr"] == 0.5e-3


@pytest.mark.parametrize(("tokens", "share"), [(1000, 3 / 4), (1, 4 / 4)])
def test_the_share_of_pictures_that_towers_compute_is_known_from_the_micro_batches(make_batch, tokens, share):
    """Two ranks train on one mini-batch. Rows 0 and 1 have the picture 5 and, being the shortest, come to one rank;
    row 2, as long as both, has the pictures 6 and 7 and comes to the other."""
    batch = make_batch([2, 2, 6], old_log_probs=torch.zeros(10))
    counts = {PICTURES: torch.tensor([1, 1, 2]), PICTURE_DIGEST: torch.tensor([5, 5, 6, 7])}
    seeing = replace(batch, carried={**counts, PICTURE_START: torch.zeros(4, dtype=torch.int32)})
    workers = workers_of(Ranks(([{}], None), ([{}], None)))
    workers.handles = lambda digests: {}
    workers.group.broadcast = lambda *_, **__: None
    budget = replace(BUDGET, tokens=tokens)
    workers.policy = replace(workers.policy, updates=replace(workers.policy.updates, budget=budget))
    for rows, expected in ((seeing, {"pictures/computed_share": share}), (batch, {})):
        metrics, _ = workers.update_mini_batches(rows, [[0, 1, 2]], workers.policy.loss, step=1)
        assert {name: value for name, value in metrics.items() if name.startswith("pictures")} == expected


def test_rows_with_pictures_weigh_as_much_as_their_tower(make_batch):
    """Of four equal rows the first is a picture: with its tower it has more work than the three others together."""
    batch = make_batch([4, 4, 4, 4], old_log_probs=torch.zeros(16))
    carried = {PICTURES: torch.tensor([1, 0, 0, 0]), PICTURE_DIGEST: torch.tensor([5])}
    seeing = replace(batch, carried={**carried, PICTURE_START: torch.zeros(1, dtype=torch.int32)})
    seeing.response_ids[:4] = 9
    for rows, together in ((seeing, [1, 3]), (batch, [2, 2])):
        sent: list[Any] = []
        workers = workers_of(Ranks(([{}], None), ([{}], None)))
        workers.handles = lambda digests: {}
        workers.group.broadcast = lambda *_, **__: None
        workers.group.scatter = lambda _, parts, sent=sent, **__: sent.extend(parts) or [([{}], None)] * 2
        vision = VisionConfig(PixelRule(), {}, [], placeholder=9, weight=50.0)
        workers.models = {"actor": replace(workers.models["actor"], vision=vision)}
        workers.update_mini_batches(rows, [[0, 1, 2, 3]], workers.policy.loss, step=1)
        counts = [sum(map(len, mini_batches[0].micro_batches)) for _, mini_batches, *_ in sent]
        assert sorted(counts) == together


def test_after_the_updates_of_a_step_no_rank_keeps_the_handles_of_its_pictures(make_batch):
    batch = make_batch([2, 2], old_log_probs=torch.zeros(4))
    fields = {PICTURE_DIGEST: torch.tensor([5, 6]), PICTURE_START: torch.zeros(2, dtype=torch.int32)}
    batch = replace(batch, carried={PICTURES: torch.tensor([1, 1]), **fields})
    workers, sent = workers_of(Ranks(([{}], None), ([{}], None))), []
    workers.models = {"actor": RankModel(None, None, BUDGET, reads=(PICTURES, *fields))}
    workers.handles = lambda digests: dict.fromkeys(digests, "handle")
    workers.group.broadcast = lambda _, handles, **__: sent.append({*handles})
    workers.update(batch, step=1)
    assert sent == [{5, 6}, set()]


def test_a_signal_fills_its_rows_and_the_others_keep_their_values(make_batch):
    columns = [np.array([0.5, 0.25, 0.125], np.float32)]
    workers = workers_of(Ranks((columns, 4)))
    batch = make_batch([2, 3, 1], truncated=torch.tensor([True, False, True]))
    signal = Signal(("reference_log_probs",), "actor", rows=("truncated", True))
    filled = workers.fill(batch, signal)
    assert required(filled.reference_log_probs).tolist() == [0.5, 0.25, 0.0, 0.0, 0.0, 0.125]
    workers = workers_of(Ranks(([np.array([7.0, 8.0, 9.0], np.float32)], 4)))
    again = workers.fill(filled, Signal(("reference_log_probs",), "actor", rows=("truncated", False)))
    assert required(again.reference_log_probs).tolist() == [0.5, 0.25, 7.0, 8.0, 9.0, 0.125]
    nothing = replace(batch, truncated=torch.zeros(3, dtype=torch.bool))
    assert workers_of(Ranks()).fill(nothing, signal).reference_log_probs is None
    metrics = workers.watch.take()
    assert metrics.pop("timing_s/reference_log_probs") > 0
    assert metrics == {
        "perf/computed_tokens/reference_log_probs": 4,
        "perf/computed_share/reference_log_probs": 4 / 5,  # of two tokens of the prompt and three of the response
    }


def sent_parts(workers: TrainWorkers, batch: Batch) -> list[list[int]]:
    """The micro-batches that the only rank gets for an update with all rows."""
    sent: list[Any] = []
    workers.group.scatter = lambda _, parts, **__: sent.extend(parts) or [([{}], None)]
    workers.update_mini_batches(batch, [range(len(batch))], workers.policy.loss, step=1)
    return sent[0][1][0].micro_batches


def test_a_micro_batch_of_several_models_has_no_pass_above_the_budget(make_batch):
    """Sixteen responses of 4 tokens to a prompt of 80: the policy computes 144 tokens, and is planned 219. A reference
    that shares nothing reads 84 per row, as does a teacher whose contexts all differ."""
    batch = make_batch([4] * 16, prompts=[80] * 16, group=[0] * 16, old_log_probs=torch.zeros(64))
    batch = replace(batch, prompt_ids=torch.arange(80).repeat(16))
    others = RankModel(None, None, BUDGET, reads=(CONTEXT,))
    contexts = {CONTEXT: torch.arange(16).repeat_interleave(80), CONTEXT_LENGTHS: torch.full((16,), 80)}
    alone = replace(others, budget=replace(BUDGET, shares=False), reads=())
    budget = replace(BUDGET, tokens=220)
    for other, rows, most in ((None, batch, 16), (alone, batch, 2), (others, replace(batch, carried=contexts), 2)):
        workers = workers_of(Ranks(([{}], None)), **({"teachers": ("teacher.of",)} if other else {}))
        workers.policy = replace(workers.policy, updates=replace(workers.policy.updates, budget=budget))
        workers.models = {**workers.models, **({"teacher.of": other} if other else {})}
        assert max(map(len, sent_parts(workers, rows))) == most
    workers = workers_of(Ranks(([{}], None)))
    workers.policy = replace(
        workers.policy, updates=replace(workers.policy.updates, budget=replace(BUDGET, tokens=218))
    )
    assert max(map(len, sent_parts(workers, batch))) < 16, "a sixteenth of what is shared counts"

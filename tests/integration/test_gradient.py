"""Invariant 2: the gradient does not depend on how a mini-batch is cut, nor on how many ranks share it."""

from dataclasses import replace

import pytest
import torch

from hybridrl.algorithms import Clip
from hybridrl.algorithms.aggregation import Totals
from hybridrl.assembly import ppo_worker_config
from hybridrl.batch import Batch
from hybridrl.cluster import Group, spawn
from hybridrl.training.packing import Budget, plan
from hybridrl.training.worker import LossConfig, MiniBatch, TrainWorker

LOSS = LossConfig(
    policy_loss="vanilla",
    clip=Clip(0.2, 0.2, 3.0),
    aggregation="token-mean",
    scale=1.0,
    temperature=0.9,
    grad_clip=1.0,
    entropy_coeff=0.01,
    kl_coef=0.05,
    kl_form="k3",
)


def ragged_batch(rows: int = 7) -> Batch:
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(2, 9, (rows,), generator=generator)
    responses = torch.randint(1, 21, (rows,), generator=generator)
    tokens = int(responses.sum())
    old = -2 * torch.rand(tokens, generator=generator) - 4
    return Batch(
        prompt_lengths=prompts,
        response_lengths=responses,
        prompt_ids=torch.randint(3, 280, (int(prompts.sum()),), generator=generator),
        response_ids=torch.randint(3, 280, (tokens,), generator=generator),
        group=torch.arange(rows) // 2,
        position=torch.arange(rows) // 2,
        sample=torch.arange(rows) % 2,
        response_mask=torch.rand(tokens, generator=generator) > 0.1,
        old_log_probs=old,
        reference_log_probs=old + 0.1,
        advantages=torch.randn(tokens, generator=generator),
    )


@pytest.fixture(scope="module")
def groups(config, session, tmp_path_factory):
    """Training ranks: one alone, and two together, with the same weights."""
    logs = tmp_path_factory.mktemp("logs")
    built = {}
    for ranks in (1, 2):
        files = [str(logs / f"{ranks}-{rank}.log") for rank in range(ranks)]
        environment = {"OMP_NUM_THREADS": "1"}
        actors = [spawn(TrainWorker, session, r, environment, r, ranks, files[r]) for r in range(ranks)]
        group = Group(actors, "train worker", files)
        places = group.broadcast(TrainWorker.place, timeout=120)
        worker = ppo_worker_config(config, uses_reference=False, total_updates=1)
        worker = replace(worker, fsdp=replace(worker.fsdp, fsdp_size=ranks))
        address = f"{places[0]['address']}:{places[0]['port']}"
        group.broadcast(TrainWorker.build, worker, address, timeout=120)
        built[ranks] = group
    return built


def gradient(group: Group, budget: Budget, loss: LossConfig = LOSS) -> dict[str, torch.Tensor]:
    batch = ragged_batch()
    passes = plan(batch.lengths.tolist(), len(group), budget)
    parts = [(batch, MiniBatch(share, Totals.of(batch)), loss, budget.padded) for share in passes]
    return group.scatter(TrainWorker.gradient, parts, timeout=120)[0]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_passes_ranks_and_padding_change_nothing(groups, mode):
    loss = replace(LOSS, aggregation=mode, scale=24.0)
    whole = gradient(groups[1], Budget(10_000), loss)
    norm = torch.sqrt(sum(value.square().sum() for value in whole.values()))
    assert norm > 0.01
    cuts = [
        (groups[1], Budget(30)),
        (groups[1], Budget(10_000, rows=1)),
        (groups[1], Budget(60, padded=True)),
        (groups[2], Budget(10_000)),
        (groups[2], Budget(30)),
        (groups[2], Budget(10_000, rows=2, padded=True)),
    ]
    for group, budget in cuts:
        found = gradient(group, budget, loss)
        assert found.keys() == whole.keys()
        difference = torch.sqrt(sum((found[name] - whole[name]).square().sum() for name in whole))
        assert difference / norm < 2e-6, (len(group), budget)


def test_a_policy_loss_of_ones_own_is_found_in_the_workers(groups, tmp_path):
    (tmp_path / "own.py").write_text("def twice(log_probs, batch, clip): return -2 * log_probs, {}\n")
    found = {
        name: gradient(groups[1], Budget(10_000), replace(LOSS, policy_loss=name, entropy_coeff=0.0, kl_coef=0.0))
        for name in (f"{tmp_path}/own.py:twice", "likelihood")
    }
    for twice, once in zip(*(gradients.values() for gradients in found.values()), strict=True):
        torch.testing.assert_close(twice, 2 * once)


def test_a_rank_without_rows_keeps_step(groups):
    batch = ragged_batch(1)
    one = MiniBatch([[0]], Totals.of(batch))
    alone = groups[1].scatter(TrainWorker.gradient, [(batch, one, LOSS, False)], timeout=120)[0]
    parts = [(batch, one, LOSS, False), (batch, MiniBatch([[]], Totals.of(batch)), LOSS, False)]
    shared = groups[2].scatter(TrainWorker.gradient, parts, timeout=120)[0]
    for name, value in alone.items():
        torch.testing.assert_close(shared[name], value, rtol=1e-4, atol=1e-7)


def test_log_probs_are_the_same_on_one_and_two_ranks(groups):
    batch = ragged_batch()
    lengths = batch.lengths.tolist()
    found = {}
    for ranks, group in groups.items():
        parts = [(batch, share, 0.9) for share in plan(lengths, ranks, Budget(40))]
        by_rank = group.scatter(TrainWorker.log_probs, parts, timeout=120)
        rows = [row for _, share, _ in parts for passes in share for row in passes]
        values = torch.cat([log_probs for log_probs, _ in by_rank])
        order = batch.select(rows)
        by_row = dict(zip(rows, values.split(order.response_lengths.tolist()), strict=True))
        found[ranks] = torch.cat([by_row[row] for row in range(len(batch))])
    torch.testing.assert_close(found[1], found[2], rtol=1e-5, atol=1e-6)

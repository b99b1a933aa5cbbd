"""All training ranks as one: rows are dealt out, passes planned, results put back in order. Runs on the driver."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor

from hybridrl.algorithms.aggregation import Totals
from hybridrl.batch import Batch
from hybridrl.cluster import Group
from hybridrl.stopwatch import Stopwatch
from hybridrl.training.packing import Budget, Passes, plan, reassemble
from hybridrl.training.worker import Forward, LossConfig, MiniBatch, TrainWorker

UPDATE_FIELDS = ("response_mask", "old_log_probs", "reference_log_probs", "advantages", "rollout_log_probs")


@dataclass(frozen=True)
class UpdatePlan:
    """How a step's rows are cut into optimizer updates, and what one pass may hold."""

    loss: LossConfig
    prompts_per_step: int
    prompts_per_update: int
    epochs: int
    shuffle: bool
    seed: int
    update_budget: Budget
    log_prob_budget: Budget
    reference_budget: Budget

    @property
    def updates_per_step(self) -> int:
        return -(-self.prompts_per_step // self.prompts_per_update) * self.epochs


class TrainWorkers:
    """The policy, and the reference where there is one, over all training ranks."""

    def __init__(self, group: Group, plan: UpdatePlan, export_dtype: str, timeout: float) -> None:
        self.group, self.plan, self.export_dtype, self.timeout = group, plan, export_dtype, timeout
        self.watch = Stopwatch()

    @property
    def needs_old_log_probs(self) -> bool:
        """With a single update a step its own log-probs are the old ones: another forward pass would repeat it."""
        return self.plan.updates_per_step > 1

    def log_probs(self, batch: Batch) -> Batch:
        """Fill `old_log_probs` and `entropies` with the present policy's."""
        with self.watch("old_log_prob"):
            found, rows = self._forward(batch, self.plan.log_prob_budget, reference=False)
            return _with_log_probs(batch, found, rows)

    def reference_log_probs(self, batch: Batch) -> Batch:
        """Fill `reference_log_probs`."""
        with self.watch("ref"):
            found, rows = self._forward(batch, self.plan.reference_budget, reference=True)
            values = reassemble([part[0] for part in found], rows, batch.response_lengths)
            return replace(batch, reference_log_probs=values)

    def update_policy(self, batch: Batch, step: int) -> tuple[Batch, dict[str, float]]:
        """The step's optimizer updates. Returns the batch with old log-probs, and the mean of the updates' metrics."""
        with self.watch("update_actor"):
            own = batch.old_log_probs is None
            loss = replace(self.plan.loss, own_old_log_probs=own)
            metrics, found, rows = self.update(batch, self._mini_batches(batch.group, step), loss)
            if own:
                batch = _with_log_probs(batch, found, rows)
        return batch, {f"actor/{name}": value for name, value in metrics.items()} | self.watch.take()

    def update(
        self, batch: Batch, mini_batches: Sequence[Sequence[int]], loss: LossConfig
    ) -> tuple[dict[str, float], list[Forward], list[list[int]]]:
        """One optimizer update a mini-batch of rows. Returns metrics, and each rank's forward results and rows."""
        lengths, ranks = batch.lengths.tolist(), len(self.group)
        plans = [plan(lengths, ranks, self.plan.update_budget, rows) for rows in mini_batches]
        totals = [Totals.of(batch.select(rows)) for rows in mini_batches]
        shares = [[passes for dealt in plans for passes in dealt[rank]] for rank in range(ranks)]
        bounds = [0, *accumulate(len(dealt[0]) for dealt in plans)]
        parts = []
        for passes in shares:
            part, own = _share(batch.only(*UPDATE_FIELDS), passes)
            cut = [MiniBatch(own[a:b], total) for (a, b), total in zip(pairwise(bounds), totals, strict=True)]
            parts.append((part, cut, loss))
        found = self.group.scatter(TrainWorker.update, parts, timeout=self.timeout)
        names = sorted({name for share, _ in found for name in share})
        metrics = {name: sum(share.get(name, 0.0) for share, _ in found) for name in names}
        return metrics, [forward for _, forward in found], [_rows(passes) for passes in shares]

    def export(self, directory: Path) -> None:
        """Write the policy as a Hugging Face directory."""
        self.group.broadcast(TrainWorker.export, str(directory), self.export_dtype, timeout=self.timeout)

    def _forward(self, batch: Batch, budget: Budget, *, reference: bool) -> tuple[list[Forward], list[list[int]]]:
        shares = plan(batch.lengths.tolist(), len(self.group), budget)
        parts = [(*_share(batch.only(), passes), self.plan.loss.temperature) for passes in shares]
        found = self.group.scatter(TrainWorker.log_probs, parts, reference=reference, timeout=self.timeout)
        return found, [_rows(passes) for passes in shares]

    def _mini_batches(self, group: Tensor, step: int) -> list[list[int]]:
        """Rows of each update: whole groups, in order or mixed anew each epoch."""
        groups = group.unique().tolist()
        members = {number: (group == number).nonzero().flatten().tolist() for number in groups}
        size, updates = self.plan.prompts_per_update, []
        for epoch in range(self.plan.epochs):
            order = groups
            if self.plan.shuffle:
                generator = torch.Generator().manual_seed(hash((self.plan.seed, step, epoch)) & 0x7FFFFFFF)
                order = [groups[i] for i in torch.randperm(len(groups), generator=generator)]
            updates += [order[start : start + size] for start in range(0, len(order), size)]
        return [[row for number in update for row in members[number]] for update in updates]


def _with_log_probs(batch: Batch, found: Sequence[Forward], rows: list[list[int]]) -> Batch:
    return replace(
        batch,
        old_log_probs=reassemble([part[0] for part in found], rows, batch.response_lengths),
        entropies=reassemble([part[1] for part in found], rows, batch.response_lengths),
    )


def _rows(passes: Passes) -> list[int]:
    return [row for rows in passes for row in rows]


def _share(batch: Batch, passes: Passes) -> tuple[Batch, Passes]:
    """The rows of some passes alone, and the passes renumbered to them. A rank without rows gets one to stand in."""
    kept = sorted(set(_rows(passes))) or [0]
    number = {row: index for index, row in enumerate(kept)}
    return batch.select(kept), [[number[row] for row in rows] for rows in passes]

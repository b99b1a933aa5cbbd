"""All training ranks as one: rows are dealt out, passes planned, results put back in order. Runs on the driver."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridrl.algorithms.aggregation import Totals
from hybridrl.algorithms.policy_losses import CHOOSERS
from hybridrl.batch import Batch
from hybridrl.checkpoint.store import SKIPPED_UPDATES, Store
from hybridrl.cluster import Group
from hybridrl.stopwatch import Stopwatch
from hybridrl.training.learner import MiniBatch
from hybridrl.training.losses import LossConfig, ValueLossConfig
from hybridrl.training.model import TokenOutputs
from hybridrl.training.packing import Budget, Passes, plan, reassemble
from hybridrl.training.worker import TrainWorker

POLICY_FIELDS = (
    "response_mask",
    "old_log_probs",
    "reference_log_probs",
    "rollout_log_probs",
    "advantages",
    "importance_weights",
    "chosen",
)
CRITIC_FIELDS = ("response_mask", "values", "returns")


@dataclass(frozen=True)
class UpdatePlan:
    """How a step's rows are cut into optimizer updates of one model, and what a pass may hold."""

    prompts_per_update: int
    epochs: int
    shuffle: bool
    seed: int
    budget: Budget

    def updates(self, prompts: int) -> int:
        return -(-prompts // self.prompts_per_update) * self.epochs

    def mini_batches(self, group: Tensor, step: int) -> list[list[int]]:
        """Rows of each update: whole groups, in order or mixed anew each epoch."""
        groups = group.unique().tolist()
        members = {number: (group == number).nonzero().flatten().tolist() for number in groups}
        size, found = self.prompts_per_update, []
        for epoch in range(self.epochs):
            order = groups
            if self.shuffle:
                generator = torch.Generator().manual_seed(hash((self.seed, step, epoch)) & 0x7FFFFFFF)
                order = [groups[i] for i in torch.randperm(len(groups), generator=generator)]
            found += [order[start : start + size] for start in range(0, len(order), size)]
        return [[row for number in update for row in members[number]] for update in found]


@dataclass(frozen=True)
class PolicyPlan:
    """How the policy learns, and what forward passes of it and of the reference may hold."""

    loss: LossConfig
    updates: UpdatePlan
    log_prob_budget: Budget
    reference_budget: Budget
    with_sum_pi_squared: bool = False


@dataclass(frozen=True)
class CriticPlan:
    """How the critic learns, and what its forward passes may hold."""

    loss: ValueLossConfig
    updates: UpdatePlan
    value_budget: Budget


@dataclass
class Updates:
    """What became of a step's optimizer updates: each one's metrics, without losses where it was skipped."""

    metrics: list[dict[str, float]]

    def mean(self, prefix: str) -> dict[str, float]:
        """The mean of each metric over the updates that have it, and how many updates were skipped."""
        names = sorted({name for update in self.metrics for name in update})
        found = {}
        for name in names:
            values = [update[name] for update in self.metrics if name in update]
            found[f"{prefix}/{name}"] = sum(values) / len(values)
        return found | {f"{prefix}/skipped_updates": sum(map(_skipped, self.metrics))}


def _skipped(update: dict[str, float]) -> bool:
    return update["skipped_updates"] > 0.5


class BrokenUpdates(RuntimeError):
    """One update after another had a loss or gradient that is not finite."""


class TrainWorkers:
    """Policy, and reference and critic where there are any, over all training ranks."""

    def __init__(
        self, group: Group, policy: PolicyPlan, critic: CriticPlan | None, export_dtype: str, timeout: float
    ) -> None:
        self.group, self.policy, self.critic = group, policy, critic
        self.export_dtype, self.timeout = export_dtype, timeout
        self.watch = Stopwatch()
        self.skipped_in_a_row = 0

    def needs_old_log_probs(self, batch: Batch) -> bool:
        """With a single update a step its own log-probs are the old ones: another forward pass would repeat it."""
        updates = self.policy.updates.updates(len(batch.group.unique()))
        return updates > 1 or self.policy.loss.policy_loss in CHOOSERS

    # -- forward passes --------------------------------------------------------------------------------------------

    def log_probs(self, batch: Batch) -> Batch:
        """Fill `old_log_probs`, `entropies` and, where the plan says so, `sum_pi_squared` with the present policy's."""
        with self.watch("old_log_prob"):
            squared = self.policy.with_sum_pi_squared
            budget, temperature = self.policy.log_prob_budget, self.policy.loss.temperature
            found, rows = self._pass(TrainWorker.log_probs, batch, budget, temperature, sum_pi_squared=squared)
            return _with_outputs(batch, found, rows)

    def reference_log_probs(self, batch: Batch) -> Batch:
        """Fill `reference_log_probs`."""
        with self.watch("ref"):
            budget, temperature = self.policy.reference_budget, self.policy.loss.temperature
            found, rows = self._pass(TrainWorker.reference_log_probs, batch, budget, temperature)
            values = reassemble([part.log_probs for part in found], rows, batch.response_lengths)
            return replace(batch, reference_log_probs=values)

    def reference_kl(self, batch: Batch) -> Batch:
        """Fill `reference_kl`, the exact KL of the present policy to the reference."""
        with self.watch("ref"):
            budget, temperature = self.policy.reference_budget, self.policy.loss.temperature
            found, rows = self._pass(TrainWorker.reference_kl, batch, budget, temperature)
            values = reassemble([part.reference_kl for part in found], rows, batch.response_lengths)
            return replace(batch, reference_kl=values)

    def values(self, batch: Batch) -> Batch:
        """Fill `values` with the present critic's."""
        assert self.critic is not None
        with self.watch("values"):
            found, rows = self._pass(TrainWorker.values, batch, self.critic.value_budget)
            return replace(batch, values=reassemble(found, rows, batch.response_lengths))

    def _pass(
        self, method: Callable[..., Any], batch: Batch, budget: Budget, *arguments: Any, **options: Any
    ) -> tuple[list[Any], list[list[int]]]:
        """Call a forward method on every rank's share of the rows. Returns each rank's result and rows."""
        shares = plan(batch.lengths.tolist(), len(self.group), budget)
        parts = [(*_share(batch.only(), passes), *arguments) for passes in shares]
        found = self.group.scatter(method, parts, timeout=self.timeout, **options)
        return found, [_rows(passes) for passes in shares]

    # -- updates ---------------------------------------------------------------------------------------------------

    def update_policy(self, batch: Batch, step: int) -> tuple[Batch, dict[str, float]]:
        """The step's updates of the policy. Returns the batch with old log-probs, and the updates' mean metrics."""
        with self.watch("update_actor"):
            own = batch.old_log_probs is None
            loss = replace(self.policy.loss, own_old_log_probs=own)
            if loss.policy_loss in CHOOSERS:
                generator = torch.Generator().manual_seed(hash((self.policy.updates.seed, step)) & 0x7FFFFFFF)
                batch = replace(batch, chosen=CHOOSERS[loss.policy_loss](batch, loss.settings, generator))
            mini_batches = self.policy.updates.mini_batches(batch.group, step)
            updates, found, rows = self.update(batch, mini_batches, loss, step)
            if own:
                batch = _with_outputs(batch, found, rows)
        return batch, updates.mean("actor") | self.watch.take()

    def update(
        self, batch: Batch, mini_batches: Sequence[Sequence[int]], loss: LossConfig, step: int
    ) -> tuple[Updates, list[TokenOutputs], list[list[int]]]:
        """One update of the policy a mini-batch of rows. Returns metrics, and each rank's outputs and rows."""
        shares, parts = self._mini_batches(batch.only(*POLICY_FIELDS), mini_batches, self.policy.updates.budget)
        parts = [(*part, loss, step) for part in parts]
        found = self.group.scatter(TrainWorker.update_policy, parts, timeout=self.timeout)
        updates = self._counted([share for share, _ in found])
        return updates, [outputs for _, outputs in found], [_rows(passes) for passes in shares]

    def update_critic(self, batch: Batch, step: int) -> dict[str, float]:
        """The step's updates of the critic. Returns the updates' mean metrics."""
        assert self.critic is not None
        with self.watch("update_critic"):
            mini_batches = self.critic.updates.mini_batches(batch.group, step)
            _, parts = self._mini_batches(batch.only(*CRITIC_FIELDS), mini_batches, self.critic.updates.budget)
            parts = [(*part, self.critic.loss, step) for part in parts]
            found = self.group.scatter(TrainWorker.update_critic, parts, timeout=self.timeout)
        return self._counted(found).mean("critic") | self.watch.take()

    def _mini_batches(
        self, batch: Batch, mini_batches: Sequence[Sequence[int]], budget: Budget
    ) -> tuple[list[Passes], list[tuple[Batch, list[MiniBatch]]]]:
        """Each rank's passes over all mini-batches, and its rows with those passes cut into mini-batches."""
        lengths, ranks = batch.lengths.tolist(), len(self.group)
        plans = [plan(lengths, ranks, budget, rows) for rows in mini_batches]
        totals = [Totals.of(batch.select(rows)) for rows in mini_batches]
        shares = [[passes for dealt in plans for passes in dealt[rank]] for rank in range(ranks)]
        bounds = [0, *accumulate(len(dealt[0]) for dealt in plans)]
        parts = []
        for passes in shares:
            part, own = _share(batch, passes)
            cut = [MiniBatch(own[a:b], total) for (a, b), total in zip(pairwise(bounds), totals, strict=True)]
            parts.append((part, cut))
        return shares, parts

    def _counted(self, shares: Sequence[list[dict[str, float]]]) -> Updates:
        """All ranks' shares of each update's metrics added up; updates skipped one after another are counted."""
        updates = [
            {name: sum(share.get(name, 0.0) for share in of_update) for of_rank in of_update for name in of_rank}
            for of_update in zip(*shares, strict=True)
        ]
        for update in updates:
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if _skipped(update) else 0
        return Updates(updates)

    def stop_if_broken(self, most: int, store: Store) -> None:
        """Raise BrokenUpdates where as many as `most` updates were skipped in a row."""
        if self.skipped_in_a_row >= most:
            raise BrokenUpdates(
                f"{self.skipped_in_a_row} updates in a row had a loss or gradient that is not finite and were skipped "
                f"(trainer.max_skipped_updates={most}); their rows lie in {store.directory / SKIPPED_UPDATES}, the "
                f"last good checkpoint is {store.last() or 'not there yet'}. Start again from it with a lower learning "
                "rate (optim.lr), or in float32 (fsdp_config.dtype=fp32)"
            )

    def refresh_reference(self) -> None:
        """Make the reference a copy of the present policy."""
        self.group.broadcast(TrainWorker.refresh_reference, timeout=self.timeout)

    def export(self, directory: Path) -> None:
        """Write the policy as a Hugging Face directory."""
        self._export(directory, critic=False)

    def export_critic(self, directory: Path) -> None:
        """Write the critic as a Hugging Face directory (token classification with one label)."""
        self._export(directory, critic=True)

    def _export(self, directory: Path, *, critic: bool) -> None:
        arguments = (str(directory), self.export_dtype)
        self.group.broadcast(TrainWorker.export, *arguments, critic=critic, timeout=self.timeout)


def _with_outputs(batch: Batch, found: Sequence[TokenOutputs], rows: list[list[int]]) -> Batch:
    """The rows with what the policy said of them, each row once."""
    held = [own for own in rows if own]
    columns = zip(*(outputs for outputs, own in zip(found, rows, strict=True) if own), strict=True)
    whole = (None if parts[0] is None else reassemble(parts, held, batch.response_lengths) for parts in columns)
    outputs = TokenOutputs(*whole)
    return replace(
        batch,
        old_log_probs=outputs.log_probs,
        entropies=outputs.entropies,
        sum_pi_squared=outputs.sum_pi_squared,
    )


def _rows(passes: Passes) -> list[int]:
    return [row for rows in passes for row in rows]


def _share(batch: Batch, passes: Passes) -> tuple[Batch, Passes]:
    """The rows of some passes alone, and the passes renumbered to them. A rank without rows gets one to stand in."""
    kept = sorted(set(_rows(passes))) or [0]
    number = {row: index for index, row in enumerate(kept)}
    return batch.select(kept), [[number[row] for row in rows] for rows in passes]

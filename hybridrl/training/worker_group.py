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
from hybridrl.batch import Batch, spans
from hybridrl.checkpoint.store import SKIPPED_UPDATES, Store
from hybridrl.cluster import Group, Pending
from hybridrl.runtime.timer import Stopwatch
from hybridrl.training.learner import MiniBatch
from hybridrl.training.losses import LossConfig, ValueLossConfig
from hybridrl.training.packing import Budget, Passes, plan, reassemble
from hybridrl.training.token_outputs import TokenOutputs
from hybridrl.training.worker import Columns, TrainWorker

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

Outputs = list[Tensor | None]  # a model's, by kind, of all rows


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
    disturbed: bool = False  # the pass of an update drops activations at random


@dataclass(frozen=True)
class CriticPlan:
    """How the critic learns, and what its forward passes may hold."""

    loss: ValueLossConfig
    updates: UpdatePlan
    value_budget: Budget


@dataclass
class Updates:
    """What became of a step's updates of one model: each one's metrics, without losses where it was skipped."""

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
        self.skipped_in_a_row = {"actor": 0, "critic": 0}
        self.most_skipped_in_a_row = 0

    def needs_old_log_probs(self, batch: Batch) -> bool:
        """With a single update a step its own log-probs are the old ones: another forward pass would repeat it, unless
        the update's drops activations."""
        updates = self.policy.updates.updates(len(batch.group.unique()))
        return updates > 1 or self.policy.disturbed or self.policy.loss.policy_loss in CHOOSERS

    # -- forward passes --------------------------------------------------------------------------------------------

    def log_probs(self, batch: Batch, *, reference_kl: bool = False) -> Batch:
        """Fill `old_log_probs` and `entropies` with the present policy's, `sum_pi_squared` where the plan says so, and
        `reference_kl`, its exact KL to the reference, where asked for."""
        with self.watch("old_log_prob"):
            options = {"reference_kl": reference_kl, "sum_pi_squared": self.policy.with_sum_pi_squared}
            budget, temperature = self.policy.log_prob_budget, self.policy.loss.temperature
            return _with_outputs(batch, self._pass(TrainWorker.log_probs, batch, budget, temperature, **options))

    def reference_log_probs(self, batch: Batch) -> Batch:
        """Fill `reference_log_probs`."""
        with self.watch("ref"):
            budget, temperature = self.policy.reference_budget, self.policy.loss.temperature
            found = TokenOutputs(*self._pass(TrainWorker.reference_log_probs, batch, budget, temperature))
            return replace(batch, reference_log_probs=found.log_probs)

    def values(self, batch: Batch) -> Batch:
        """Fill `values` with the present critic's."""
        assert self.critic is not None
        with self.watch("values"):
            (values,) = self._pass(TrainWorker.values, batch, self.critic.value_budget)
            return replace(batch, values=values)

    def _pass(
        self, method: Callable[..., Any], batch: Batch, budget: Budget, *arguments: Any, **options: Any
    ) -> Outputs:
        """Call a forward method on every rank's share of the rows; its outputs in the batch's row order."""
        shares = plan(batch.lengths.numpy(), len(self.group), budget)
        rows = self.group.share(batch.only())
        parts = [(rows, passes, *arguments) for passes in shares]
        found = self.group.scatter(method, parts, timeout=self.timeout, **options)
        return _whole(found, shares, batch.response_lengths, budget)

    # -- updates ---------------------------------------------------------------------------------------------------

    def update_policy(self, batch: Batch, step: int) -> tuple[Batch, dict[str, float]]:
        """The step's updates of the policy. Returns the batch with old log-probs, and the updates' mean metrics."""
        with self.watch("update_actor"):
            own = batch.old_log_probs is None
            loss = replace(self.policy.loss, own_old_log_probs=own, tell_entropy=not own and batch.entropies is None)
            mini_batches = self.policy.updates.mini_batches(batch.group, step)
            if loss.policy_loss in CHOOSERS:
                batch = replace(batch, chosen=self._chosen(batch, mini_batches, step))
            updates, outputs = self.update(batch, mini_batches, loss, step)
            if own:
                batch = _with_outputs(batch, outputs)
        return batch, updates.mean("actor") | self._kl_weight() | self.watch.take()

    def _kl_weight(self) -> dict[str, float]:
        loss = self.policy.loss
        return {} if loss.kl_form is None else {"actor/kl_coef": loss.kl_coef}

    def _chosen(self, batch: Batch, mini_batches: Sequence[Sequence[int]], step: int) -> Tensor:
        """The tokens that the loss treats apart, chosen within each mini-batch of the first epoch."""
        choose, settings = CHOOSERS[self.policy.loss.policy_loss], self.policy.loss.settings
        generator = torch.Generator().manual_seed(hash((self.policy.updates.seed, step)) & 0x7FFFFFFF)
        chosen = torch.zeros_like(batch.response_mask)
        for rows in mini_batches[: len(mini_batches) // self.policy.updates.epochs]:
            places = spans(batch.response_lengths, torch.as_tensor(rows))
            chosen[places] = choose(batch.select(rows), settings, generator)
        return chosen

    def update(
        self, batch: Batch, mini_batches: Sequence[Sequence[int]], loss: LossConfig, step: int
    ) -> tuple[Updates, Outputs]:
        """One update of the policy a mini-batch of rows. Returns metrics, and outputs where they are the old ones."""
        budget = self.policy.updates.budget
        shares, parts = self._mini_batches(batch.only(*POLICY_FIELDS), mini_batches, budget)
        parts = [(*part, loss, step) for part in parts]
        found = self.group.scatter(TrainWorker.update_policy, parts, timeout=self.timeout)
        updates = self._counted([share for share, _ in found[:: budget.devices]], "actor")
        if not loss.own_old_log_probs:
            return updates, []
        return updates, _whole([columns for _, columns in found], shares, batch.response_lengths, budget)

    def update_critic(self, batch: Batch, step: int) -> dict[str, float]:
        """The step's updates of the critic. Returns the updates' mean metrics."""
        assert self.critic is not None
        with self.watch("update_critic"):
            mini_batches, budget = self.critic.updates.mini_batches(batch.group, step), self.critic.updates.budget
            _, parts = self._mini_batches(batch.only(*CRITIC_FIELDS), mini_batches, budget)
            parts = [(*part, self.critic.loss, step) for part in parts]
            found = self.group.scatter(TrainWorker.update_critic, parts, timeout=self.timeout)
        return self._counted(found[:: budget.devices], "critic").mean("critic") | self.watch.take()

    def _mini_batches(
        self, batch: Batch, mini_batches: Sequence[Sequence[int]], budget: Budget
    ) -> tuple[list[Passes], list[tuple[Pending, list[MiniBatch]]]]:
        """Each rank's passes over all mini-batches; the rows, shared, and those passes cut into mini-batches."""
        lengths, ranks = batch.lengths.numpy(), len(self.group)
        plans = [plan(lengths, ranks, budget, rows) for rows in mini_batches]
        written = batch.per_row(batch.response_mask.long())
        totals = [Totals.counted(written[list(rows)]) for rows in mini_batches]
        shares = [[passes for dealt in plans for passes in dealt[rank]] for rank in range(ranks)]
        bounds = [0, *accumulate(len(dealt[0]) for dealt in plans)]
        parts, shared = [], self.group.share(batch)
        for passes in shares:
            cut = [MiniBatch(passes[a:b], total) for (a, b), total in zip(pairwise(bounds), totals, strict=True)]
            parts.append((shared, cut))
        return shares, parts

    def _counted(self, shares: Sequence[list[dict[str, float]]], model: str) -> Updates:
        """All shares of each update's metrics added up; a model's updates skipped in a row are counted."""
        updates = [
            {name: sum(share.get(name, 0.0) for share in of_update) for of_rank in of_update for name in of_rank}
            for of_update in zip(*shares, strict=True)
        ]
        for update in updates:
            self.skipped_in_a_row[model] = self.skipped_in_a_row[model] + 1 if _skipped(update) else 0
            self.most_skipped_in_a_row = max(self.most_skipped_in_a_row, self.skipped_in_a_row[model])
        return Updates(updates)

    def stop_if_broken(self, most: int, store: Store) -> None:
        """Raise BrokenUpdates where as many as `most` updates of one model were skipped in a row."""
        if self.most_skipped_in_a_row >= most:
            place, last = store.directory / SKIPPED_UPDATES, store.last()
            raise BrokenUpdates(
                f"{self.most_skipped_in_a_row} updates in a row had a loss or gradient that is not finite and were "
                f"skipped (trainer.max_skipped_updates={most}); their rows lie in {place} on the machine of each rank; "
                f"the last good checkpoint is {last or 'not there yet'}. Start again from it with a lower learning "
                "rate (optim.lr), or in float32 (fsdp_config.dtype=fp32)"
            )

    def refresh_reference(self) -> None:
        """Make the reference a copy of the present policy."""
        self.group.broadcast(TrainWorker.refresh_reference, timeout=self.timeout)

    # -- saving ----------------------------------------------------------------------------------------------------

    def start_save(self, directory: Path, contents: dict[str, list[str]]) -> None:
        """Have parts of each model's state written in the background; returns when they are copied to host memory."""
        self.group.broadcast(TrainWorker.start_save, str(directory), contents, timeout=self.timeout)

    def finished_save(self) -> bool:
        """Whether every rank has written all. RemoteFailure, once, where one could not."""
        return all(self.group.broadcast(TrainWorker.finished_save, timeout=self.timeout))

    def load(self, directory: Path, contents: dict[str, list[str]]) -> dict[str, int]:
        """Read parts of each model's state; on any number of ranks. Returns how many updates each has had."""
        return self.group.broadcast(TrainWorker.load, str(directory), contents, timeout=self.timeout)[0]

    def export(self, directory: Path, name: str = "actor") -> None:
        """Write a model (actor, critic or reference) whole, as a Hugging Face directory."""
        self.group.broadcast(TrainWorker.export, str(directory), self.export_dtype, name, timeout=self.timeout)


def _whole(found: Sequence[Columns], shares: Sequence[Passes], lengths: Tensor, budget: Budget) -> Outputs:
    """Every rank's outputs of its rows, a kind at a time, in the batch's row order. A rank may have no rows; those that
    made their passes together have the same outputs."""
    found, rows = found[:: budget.devices], [_rows(passes) for passes in shares[:: budget.devices]]
    held = [own for own in rows if own]
    columns = zip(*(outputs for outputs, own in zip(found, rows, strict=True) if own), strict=True)
    return [None if column[0] is None else reassemble(column, held, lengths) for column in columns]


def _with_outputs(batch: Batch, columns: Outputs) -> Batch:
    """The rows with what the policy said of them."""
    found = TokenOutputs(*columns)
    return replace(
        batch,
        old_log_probs=found.log_probs,
        entropies=found.entropies,
        sum_pi_squared=found.sum_pi_squared,
        reference_kl=found.reference_kl,
    )


def _rows(passes: Passes) -> list[int]:
    return [row for rows in passes for row in rows]

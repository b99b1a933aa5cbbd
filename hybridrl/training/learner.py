"""A sharded model that learns: gradients pass by pass, one optimizer step a mini-batch. Which loss, it is told.

A loss, ratio or gradient that is not finite never reaches the parameters: the update is skipped on every rank, and the
rows that made it are written to a file.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hybridrl import device as devices
from hybridrl.algorithms.aggregation import Totals
from hybridrl.batch import Batch
from hybridrl.config.schema import FSDPConfig
from hybridrl.training.fsdp import host_parameters, move_parameters
from hybridrl.training.optimizer import Optimizers
from hybridrl.training.packing import ModelInputs, lay_out
from hybridrl.training.sequence_parallel import slice_of
from hybridrl.training.shards import whole

MOST_FILES = 100  # of skipped updates that a rank writes for a model


@dataclass(frozen=True)
class MiniBatch:
    """One rank's share of an optimizer update: its passes, and the divisors of the whole mini-batch."""

    passes: list[list[int]]
    totals: Totals


# Rows of a pass and the totals of its mini-batch -> this pass's share of the loss, and of each metric. Without totals
# the rows only stand in, to keep step with other ranks: the loss is 0, of whatever the model says.
Loss = Callable[[Batch, Totals | None], tuple[Tensor, dict[str, Tensor]]]
Shares = dict[str, float]

# Rows and mini-batch as they are trained on, and shares of metrics measured before the gradient.
Prepared = tuple[Batch, MiniBatch, dict[str, Tensor]]
Prepare = Callable[[Batch, MiniBatch], Prepared]


def unchanged(batch: Batch, mini_batch: MiniBatch) -> Prepared:
    return batch, mini_batch, {}


class Learner:
    """One rank's part of a model in training. Files of a skipped update's rows are named by `evidence`, a path. The
    ranks of `group`, where there is one, have the same rows: each returns the same shares, which count once."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        fsdp: FSDPConfig,
        device: torch.device,
        *,
        padded: bool,
        evidence: Path,
        group: ProcessGroup | None = None,
    ) -> None:
        self.model, self.optimizers, self.fsdp, self.device = model, optimizers, fsdp, device
        self.padded, self.evidence, self.group = padded, evidence, group
        self.leaves = fsdp.param_offload and not fsdp.offload_policy and device.type != "cpu"
        self.places: dict[nn.Parameter, Tensor] = {}  # in host memory, once the parameters have been there
        self.away = False

    def inputs(self, rows: Batch) -> ModelInputs:
        """What this rank's model sees of rows."""
        return slice_of(lay_out(rows, self.padded), self.group).to(self.device)

    def update(
        self,
        batch: Batch,
        mini_batches: list[MiniBatch],
        loss: Loss,
        clip: float,
        step: int,
        repeats: Callable[[], object] = bool,
        prepare: Prepare = unchanged,
    ) -> list[Shares]:
        """Optimizer updates, one a mini-batch. Returns this rank's share of each metric (shares add up over ranks,
        of a group's one). `repeats` is called before a mini-batch is gone through once more."""
        self.model.train()
        found, scale = [], self.optimizers.loss_scale
        ranks = dist.get_world_size() // (self.group.size() if self.group else 1)  # whose shares are added up
        for number, (part, mini_batch, more) in enumerate(map(partial(prepare, batch), mini_batches), 1):
            factor = scale.factor
            shares, sound, all_sound, norm = self._gradient(part, mini_batch, loss, clip)
            while all_sound and not math.isfinite(norm) and scale.shrink():
                self.optimizers.zero_grad()
                repeats()
                shares, sound, all_sound, norm = self._gradient(part, mini_batch, loss, clip)
            lr, applied = self.optimizers.lr, all_sound and math.isfinite(norm)
            if not applied:
                scale.factor = factor  # it was not to blame
            self._step(applied)
            if applied:
                shares |= more | {"grad_norm": torch.tensor(norm / ranks)}
            else:
                self._write_rows(part, mini_batch, sound, all_sound, f"step-{step}-update-{number}")
                shares = {}
            found.append({name: float(value) for name, value in shares.items()})
            found[-1] |= {"lr": lr / ranks, "skipped_updates": (not applied) / ranks}
            if scale.adapts:
                found[-1]["loss_scale"] = scale.factor / ranks
        return found

    def _gradient(
        self, batch: Batch, mini_batch: MiniBatch, loss: Loss, clip: float
    ) -> tuple[dict[str, Tensor], Tensor, bool, float]:
        """The gradient of a mini-batch, no larger than `clip`. Returns shares of metrics, which passes' losses are
        finite, whether those of all ranks are, and the gradient's norm as it was."""
        shares: dict[str, Tensor] = {}
        losses = [self.backward(batch, rows, mini_batch.totals, loss, shares) for rows in mini_batch.passes]
        self.optimizers.loss_scale.undo(self.model)
        sound = torch.stack(losses).isfinite()
        return shares, sound, self._on_all_ranks(bool(sound.all())), self._clip(clip)

    def backward(
        self, batch: Batch, rows: list[int], totals: Totals, loss: Loss, shares: dict[str, Tensor] | None = None
    ) -> Tensor:
        """Forward and backward of one pass; a rank without rows keeps step with a loss of 0. Returns the loss."""
        total, found = loss(batch.select(rows or [0]), totals if rows else None)
        # FSDP averages over ranks; the divisors are those of the whole mini-batch already. Of a loss that the ranks of
        # a group share, each has the gradient of its own slice.
        (total * (dist.get_world_size() * self.optimizers.loss_scale.factor)).backward()
        if rows and shares is not None:
            for name, value in ({"loss": total} | found).items():
                shares[name] = shares.get(name, 0.0) + value.detach()
        return total.detach()

    def whole_gradient(self, batch: Batch, mini_batch: MiniBatch, loss: Loss, prepare: Prepare) -> dict[str, Tensor]:
        """The gradient of one mini-batch by parameter name, unsharded, without an update; for tests and diagnosis."""
        self.model.train()
        part, mini_batch, _ = prepare(batch, mini_batch)
        for rows in mini_batch.passes:
            self.backward(part, rows, mini_batch.totals, loss)
        self.optimizers.loss_scale.undo(self.model)
        named = self.model.named_parameters()
        found = {name: whole(p.grad).cpu() for name, p in named if p.grad is not None}
        self.optimizers.zero_grad()
        return found

    def _clip(self, limit: float) -> float:
        """Scale the gradient down to a norm. Returns the norm before, the same on every rank."""
        return float(whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)))

    def _on_all_ranks(self, holds: bool) -> bool:
        """An infinite loss may leave the gradient finite, so ranks have to tell one another of it."""
        broken = torch.tensor(float(not holds), device=self.device)
        dist.all_reduce(broken)
        return not broken

    def _step(self, applied: bool) -> None:
        self.optimizers.step() if applied else self.optimizers.skip()
        if applied:
            self.optimizers.loss_scale.grow()
        self.optimizers.zero_grad()

    def _write_rows(self, batch: Batch, mini_batch: MiniBatch, sound: Tensor, all_sound: bool, name: str) -> None:
        """Keep the passes whose loss is not finite for whoever looks for the fault: `torch.load` of a dictionary.

        Where no rank has one, any row may be the fault: then all of them, by their tokens alone.
        """
        if self.group is not None and self.group.rank():
            return  # another rank writes the same
        suspects = torch.ones_like(sound) if all_sound else ~sound
        rows = sorted({row for index in suspects.nonzero().flatten() for row in mini_batch.passes[index]})
        directory, rank = self.evidence.parent, f"rank-{dist.get_rank()}.pt"
        directory.mkdir(parents=True, exist_ok=True)
        if not rows or len(list(directory.glob(f"{self.evidence.name}-*-{rank}"))) >= MOST_FILES:
            return
        part = batch.select(rows)
        part = part.only() if all_sound else part
        values = {item.name: vars(part)[item.name] for item in fields(part) if vars(part)[item.name] is not None}
        torch.save(values, directory / f"{self.evidence.name}-{name}-{rank}")

    def offload(self, *, to_host: bool) -> None:
        """Move the parameters to or from host memory, if the configuration says that they may leave the device."""
        if not self.leaves or self.away == to_host:
            return
        if to_host:
            self.places = self.places or host_parameters(self.model)
            move_parameters(self.model, self.places)
            devices.synchronize(self.device.type)  # whoever reads host memory need not know that copies were on the way
        else:
            self.model.to(self.device, non_blocking=True)
        self.away = to_host


def on_device(learner: Learner, *others: Learner | None) -> Learner:
    """This learner with its parameters on the device; the others' leave it first, if their configuration allows it."""
    for other in others:
        if other is not None:
            other.offload(to_host=True)
    learner.offload(to_host=False)
    return learner

"""A sharded model in training: gradients micro-batch by micro-batch, one optimizer step per mini-batch. The loss is
passed in.

A loss, ratio or gradient that is not finite never reaches the parameters: the update is skipped on every rank. The
rows that caused it, if known, are written to a file, with the name of the first module whose output was not finite.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hybridrl.config.schema import FSDPConfig, ModelConfig, OptimizerConfig
from hybridrl.core import device as devices
from hybridrl.core.algorithms.objective import Divisors
from hybridrl.core.batch import Batch
from hybridrl.core.carried import CONTEXT
from hybridrl.core.training.attention import slice_of
from hybridrl.core.training.fsdp import clip_gradient, host_parameters, move_parameters, reshard
from hybridrl.core.training.optimizer import Optimizers
from hybridrl.core.training.packing import MicroBatch, ModelInputs, as_read, each_token_once, pack_rows, to_device
from hybridrl.core.training.planning import MicroBatchBudget, MiniBatch
from hybridrl.core.training.vision import Vision, VisionConfig

Head = Literal["language", "value", "score", "trained score"]
MOST_FILES = 100  # limit on the files of skipped updates, per rank and model


@dataclass(frozen=True)
class LearnerConfig:
    """The training of a model."""

    optimizer: OptimizerConfig
    total_updates: int
    updates_per_step: int = 1


@dataclass(frozen=True)
class RankModel:
    """A model on the training ranks, with a layout of its own."""

    model: ModelConfig
    fsdp: FSDPConfig
    budget: MicroBatchBudget  # size of its micro-batches without a gradient
    head: Head = "language"
    trained: LearnerConfig | None = None  # None: frozen
    # own: read from the path; copy: read from the path, later replaced by the actor's (`TrainWorker.refresh`); average:
    # a copy in the actor's type of storage; live: the actor's; base: the actor's without its adapter. The last two take
    # no memory.
    weights: Literal["own", "copy", "average", "live", "base"] = "own"
    reads: tuple[str, ...] = ()  # names of the carried fields that its forward passes read
    vision: VisionConfig | None = None  # if the rows of the run have pictures

    @property
    def compute_dtype(self) -> torch.dtype:
        return getattr(torch, self.fsdp.dtype or "float32")

    @property
    def storage_dtype(self) -> torch.dtype:
        """Return the type of the model's own parameters; the type of computation if they are frozen."""
        frozen = (self.trained is None and self.weights != "average") or self.model.lora_rank
        return self.compute_dtype if frozen else getattr(torch, self.fsdp.model_dtype)


# Maps a micro-batch and the divisors of its mini-batch to this micro-batch's share of the loss and of each metric.
# Divisors are None for a dummy row (see `Learner.micro_batches`): the loss is then 0 times the model's outputs.
BatchLoss = Callable[[MicroBatch, Divisors | None], tuple[Tensor, dict[str, Tensor]]]
Shares = dict[str, float]

# Rows and mini-batch as they are trained on, and shares of metrics measured before the gradient.
Prepared = tuple[Batch, MiniBatch, dict[str, Tensor]]
Prepare = Callable[[Batch, MiniBatch], Prepared]


@dataclass(eq=False)
class ModelShard:
    """One rank's part of a model, and the layout of its rows. Ranks of a sequence-parallel `group` have the same
    rows."""

    model: nn.Module
    fsdp: FSDPConfig
    device: torch.device
    padded: bool
    group: ProcessGroup | None = None
    tensor_ranks: int = 1  # size of a tensor group: its ranks have the same tokens, too
    reads: tuple[str, ...] = ()
    ahead: int = 1  # 0: its output for a token is computed from this token too
    vision: Vision | None = None  # if the rows of the run have pictures
    shares: bool = True  # packed rows that begin alike have these tokens once

    def lay_out(self, rows: Batch) -> ModelInputs:
        """Return this rank's model inputs for these rows, in host memory."""
        rows = as_read(rows, self.reads)
        inputs = pack_rows(rows, self.padded, self.ahead)
        inputs = self.vision.inputs(rows, inputs) if self.vision else inputs
        return slice_of(each_token_once(inputs, rows, self.ahead, self.shares), self.group)

    def inputs(self, rows: Batch) -> ModelInputs:
        """Return this rank's model inputs for these rows."""
        return self.lay_out(rows).to(self.device)


@dataclass(eq=False, kw_only=True)
class Learner(ModelShard):
    """One rank's part of a model in training. `dump_prefix` is the path prefix of the files with a skipped update's
    rows. Ranks of a sequence-parallel group return equal shares of metrics; one copy is counted."""

    optimizers: Optimizers
    dump_prefix: Path
    # Whether a loss may pass its gradient to the model early. False once the actual gradient was another one, as for a
    # custom term that wrongly states `by_token`.
    early_gradient: bool = True
    against: Mapping[str, ModelShard] = field(default_factory=dict)  # with which the current loss compares this model
    teachers: Mapping[str, ModelShard] = field(default_factory=dict)  # the same, each for the rows that it teaches
    host_parameters: dict[nn.Parameter, Tensor] = field(default_factory=dict)  # set when they are first offloaded
    on_host: bool = False

    @property
    def ranks(self) -> int:
        """Return the number of ranks over which FSDP averages a gradient; the ranks of a tensor group count as one."""
        return dist.get_world_size() // self.tensor_ranks

    def update(
        self,
        batch: Batch,
        mini_batches: list[MiniBatch],
        loss: BatchLoss,
        clip: float,
        step: int,
        on_retry: Callable[[], object] = lambda: None,
        prepare: Prepare | None = None,
    ) -> list[Shares]:
        """Run one optimizer update per mini-batch. Returns this rank's share of each metric; the shares of one rank
        per group add up to it. `on_retry` is called before forward passes are repeated."""
        self.model.train()
        metrics, scale, early = [], self.optimizers.loss_scale, self.early_gradient
        ranks = self.ranks // (self.group.size() if self.group else 1)  # number of shares that are added up
        for number, mini_batch in enumerate(mini_batches, 1):
            part, mini_batch, extra_shares = prepare(batch, mini_batch) if prepare else (batch, mini_batch, {})
            factor = scale.factor
            shares, finite, all_finite, norm = self.gradient(part, mini_batch, loss, clip)
            # All ranks decide alike, as the norm and `all_finite` are reduced over them.
            while all_finite and not math.isfinite(norm) and self._can_retry():
                self.optimizers.zero_grad()
                on_retry()
                shares, finite, all_finite, norm = self.gradient(part, mini_batch, loss, clip)
            lr, sound = self.optimizers.lr, all_finite and math.isfinite(norm)
            empty = self.optimizers.skip_zero_gradient and norm == 0
            if sound:
                self.optimizers.skip() if empty else self.optimizers.step()
                scale.grow()
                early = self.early_gradient
                shares |= {name: float(value) for name, value in extra_shares.items()} | {"grad_norm": norm / ranks}
            else:
                scale.factor, self.early_gradient = factor, early  # they were not the cause
                self.optimizers.skip()
                on_retry()
                module = first_not_finite(self.model, partial(self._losses, part, mini_batch, loss))
                self._write_rows(part, mini_batch, finite, all_finite, f"step-{step}-update-{number}", module)
                shares = {"computed_tokens": shares["computed_tokens"]}
            self.optimizers.zero_grad()
            metrics.append(shares | {"lr": lr / ranks, "skipped_updates": (not sound) / ranks})
            if self.optimizers.skip_zero_gradient:
                metrics[-1]["zero_gradient_share"] = empty / ranks
            if scale.adapts:
                metrics[-1]["loss_scale"] = scale.factor / ranks
        return metrics

    def micro_batches(self, batch: Batch, mini_batch: MiniBatch) -> Iterator[tuple[MicroBatch, Divisors | None]]:
        """Yield the micro-batches on the device, each with the divisors of its loss. All are copied there together,
        before the first forward pass. With fields for the model, such as routes, they are copied one by one: together
        these take much memory."""
        planned, teachers = mini_batch.micro_batches, mini_batch.teachers or [""] * len(mini_batch.micro_batches)
        # Every forward and backward pass gathers and reduces shards with all ranks. A rank whose micro-batch is empty
        # therefore runs one dummy row with a loss of 0: otherwise the others' collectives would wait forever.
        selected = ((batch.select(rows or [0]), teacher) for rows, teacher in zip(planned, teachers, strict=True))
        parts = (MicroBatch(rows, self.lay_out(rows), self._others(rows, name), name) for rows, name in selected)
        others = [*self.against.values(), *self.teachers.values()]
        reads = batch.carried.keys() & {*self.reads, *(name for other in others for name in other.reads)} - {CONTEXT}
        groups = ([part] for part in parts) if reads else [[*parts]]
        copied = (part for group in groups for part in to_device(group, self.device))
        for rows, part in zip(planned, copied, strict=True):
            yield part, mini_batch.totals if rows else None

    def _others(self, rows: Batch, teacher: str) -> dict[str, ModelInputs]:
        """Return the inputs of the models with which the loss of these rows compares this one."""
        others = {**self.against, **({teacher: self.teachers[teacher]} if teacher else {})}
        return {name: shard.lay_out(rows) for name, shard in others.items()}

    def gradient(
        self, batch: Batch, mini_batch: MiniBatch, loss: BatchLoss, clip: float
    ) -> tuple[Shares, Tensor, bool, float]:
        """Compute a mini-batch's gradient, clipped to a norm of `clip`. Returns shares of metrics; whether each
        micro-batch's loss is finite; whether all ranks' are; and the norm before clipping, equal on every rank."""
        shares: dict[str, Tensor] = {}
        losses, computed = [], 0
        for part, totals in self.micro_batches(batch, mini_batch):
            computed += part.inputs.computed if totals else 0
            total, metrics = loss(part, totals)
            # FSDP averages over ranks, while the divisors already are those of the complete mini-batch. When the ranks
            # of a group share a loss, each has the gradient of its own slice.
            (total * (self.ranks * self.optimizers.loss_scale.factor)).backward()
            losses.append(total.detach())
            for name, value in ({"loss": total} | metrics).items() if totals else ():
                shares[name] = shares.get(name, 0.0) + value.detach()
        reshard(self.model)
        self.optimizers.loss_scale.undo(self.model)
        finite = torch.stack(losses).isfinite()
        # An infinite loss may leave the gradient finite, so the ranks exchange it.
        broken = (~finite.all()).float()
        dist.all_reduce(broken)
        norm = clip_gradient(self.model, clip)
        # The host waits for the device here alone, and reads one vector.
        any_broken, norm_before, *values = torch.stack([broken, norm, *shares.values()]).tolist()
        metrics = dict(zip(shares, values, strict=True)) | {"computed_tokens": float(computed)}
        return metrics, finite, not any_broken, norm_before

    def _can_retry(self) -> bool:
        """Change what may have made the gradient of a finite loss infinite or NaN: in float16 too large a loss scale,
        otherwise an early gradient that was another one. False if nothing is left to change: rows are at fault."""
        if self.optimizers.loss_scale.shrink():
            return True
        early, self.early_gradient = self.early_gradient, False
        return early

    @torch.no_grad()
    def _losses(self, batch: Batch, mini_batch: MiniBatch, loss: BatchLoss) -> None:
        """Run the forward passes of a mini-batch; collective."""
        for part, totals in self.micro_batches(batch, mini_batch):
            loss(part, totals)
        reshard(self.model)

    def gradient_norms(self, batch: Batch, mini_batches: list[MiniBatch], loss: BatchLoss) -> list[float]:
        """Return the norm of each mini-batch's gradient, without an update; collective."""
        self.model.train()
        norms, early, self.early_gradient = [], self.early_gradient, False  # as nothing is repeated here
        for mini_batch in mini_batches:
            *_, norm = self.gradient(batch, mini_batch, loss, math.inf)
            self.optimizers.zero_grad()
            norms.append(norm)
        self.early_gradient = early
        return norms

    def _write_rows(
        self, batch: Batch, mini_batch: MiniBatch, finite: Tensor, all_finite: bool, name: str, module: str
    ) -> None:
        """Write the micro-batches whose loss is not finite to a file, for diagnosis: `torch.load` returns a dictionary.
        If the losses of all ranks are finite, any row may be the cause: then all rows are written, but only tokens."""
        print(f"{name}: the loss or gradient is not finite; first module with such an output: {module or 'none'}")
        if self.group is not None and self.group.rank():
            return  # another rank writes the same
        suspects = torch.ones_like(finite) if all_finite else ~finite
        rows = sorted({row for index in suspects.nonzero().flatten() for row in mini_batch.micro_batches[index]})
        directory, rank = self.dump_prefix.parent, f"rank-{dist.get_rank()}.pt"
        directory.mkdir(parents=True, exist_ok=True)
        if not rows or len(list(directory.glob(f"{self.dump_prefix.name}-*-{rank}"))) >= MOST_FILES:
            return
        part = batch.select(rows)
        part = part.only() if all_finite else part
        values = {name: value for name, _, value in part.filled()}
        torch.save(values | {"module": module}, directory / f"{self.dump_prefix.name}-{name}-{rank}")

    def offload(self, *, to_host: bool) -> None:
        """Move the parameters to or from host memory, if the configuration allows them to leave the device."""
        offloads = self.fsdp.param_offload and not self.fsdp.offload_policy and self.device.type != "cpu"
        if not offloads or self.on_host == to_host:
            return
        if to_host:
            self.host_parameters = self.host_parameters or host_parameters(self.model)
            move_parameters(self.model, self.host_parameters)
            devices.synchronize(self.device.type)  # readers of host memory need not know about pending copies
        else:
            self.model.to(self.device, non_blocking=True)
        self.on_host = to_host


def first_not_finite(model: nn.Module, forward: Callable[[], None]) -> str:
    """Return the name of the first innermost module with an output that is not finite in `forward` on this rank. Empty
    if there is none: the first such value is then in the head, or in a field of the rows."""
    names: list[str] = []

    def look(name: str, output: Any) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        if any(isinstance(tensor, Tensor) and not tensor.isfinite().all() for tensor in tensors):
            names.append(name)

    hooks = [
        module.register_forward_hook(lambda module, arguments, output, name=name: look(name, output))
        for name, module in model.named_modules()
    ]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    return next(iter(names), "")

"""One training rank: an actor that holds a shard of the policy, and of the reference where there is one.

Does what the driver planned, on the rows it is given. Knows nothing of prompts as text, rewards or the rollout engine.
"""

import math
import os
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hybridrl import device as devices
from hybridrl.algorithms.aggregation import Totals, token_weights
from hybridrl.algorithms.kl import kl_estimate
from hybridrl.algorithms.policy_loss import POLICY_LOSSES, Clip, PolicyLoss
from hybridrl.batch import Batch
from hybridrl.checkpoint.export import export_model
from hybridrl.config.own_code import load_function
from hybridrl.config.schema import FSDPConfig, ModelConfig, OptimizerConfig
from hybridrl.guard import redirect_output
from hybridrl.training.fsdp import mesh, reshard, shard, whole_tensors
from hybridrl.training.model import LanguageModel, check_log_probs, load_language_model
from hybridrl.training.optimizer import Optimizers
from hybridrl.training.packing import lay_out
from hybridrl.weights.handles import Handle, SharedBuffer, digest
from hybridrl.weights.layout import Bucket, plan_buckets


@dataclass(frozen=True)
class WorkerConfig:
    """What a training rank is built from."""

    device: str
    model: ModelConfig
    fsdp: FSDPConfig
    optimizer: OptimizerConfig | None
    total_updates: int
    collective_timeout: float
    seed: int
    with_reference: bool = False
    reference_offload: bool = False


@dataclass(frozen=True)
class LossConfig:
    """The loss of an update, as plain values."""

    policy_loss: str  # a name, or path/to/file.py:function: functions of a user's file do not travel
    clip: Clip
    aggregation: str
    scale: float
    temperature: float
    grad_clip: float
    entropy_coeff: float = 0.0
    kl_coef: float = 0.0
    kl_form: str = "k3"
    own_old_log_probs: bool = False  # the pass's own log-probs are the old ones: nothing has been updated since


@cache
def find_policy_loss(name: str) -> PolicyLoss:
    """The loss of this name, or the user's own; ConfigError where there is none."""
    key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    return POLICY_LOSSES[name] if name in POLICY_LOSSES else load_function(name, key)


@dataclass(frozen=True)
class MiniBatch:
    """One rank's share of an optimizer update: its passes, and the divisors of the whole mini-batch."""

    passes: list[list[int]]
    totals: Totals


# Log-probs and, where they were asked for, entropies of response tokens.
Forward = tuple[Tensor, Tensor | None]


class TrainWorker:
    def __init__(self, rank: int, ranks: int, log_file: str) -> None:
        self.rank, self.ranks = rank, ranks
        redirect_output(log_file)

    def place(self) -> dict[str, Any]:
        """Where this rank runs: node address, a free port on it, and the GPU that Ray gave."""
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        return {"address": ray.util.get_node_ip_address(), "port": port, "gpus": ray.get_gpu_ids()}

    def build(self, config: WorkerConfig, address: str) -> None:
        """Load and shard the model; collective."""
        self.config = config
        gpus = ray.get_gpu_ids()
        if config.device == "cuda" and gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = str(gpus[0])
        devices.seed_everything(config.seed)
        devices.join_group(config.device, address, self.rank, self.ranks, config.collective_timeout)
        self.device = devices.current(config.device)
        self.padded = not config.model.use_remove_padding
        grid = mesh(config.device, self.ranks, config.fsdp.fsdp_size)
        stored = getattr(torch, config.fsdp.model_dtype)
        loaded = load_language_model(config.model, stored)
        check_log_probs(loaded, padded=self.padded)
        self.model = shard(loaded, config.fsdp, grid)
        self.optimizers = Optimizers(self.model, config.optimizer, config.total_updates) if config.optimizer else None
        self.reference = None
        if config.with_reference:
            frozen = load_language_model(config.model, stored).requires_grad_(False)
            self.reference = shard(frozen, config.fsdp, grid, offloaded=config.reference_offload).eval()

    # -- passes over rows ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def log_probs(
        self, batch: Batch, passes: list[list[int]], temperature: float, *, reference: bool = False
    ) -> Forward:
        """Log-probs, of the policy entropies too, of the response tokens of the passes' rows, in that order."""
        model = self.reference if reference else self.model.eval()
        forwards = []
        for rows in passes:
            log_probs, entropies = self._forward(model, batch.select(rows or [0]), temperature, not reference)
            forwards += [(log_probs, entropies)] if rows else []
        reshard(model)
        return _joined(forwards)

    def _forward(self, model: LanguageModel, batch: Batch, temperature: float, with_entropy: bool) -> Forward:
        return model(lay_out(batch, self.padded).to(self.device), temperature, with_entropy)

    def update(self, batch: Batch, mini_batches: list[MiniBatch], loss: LossConfig) -> tuple[dict[str, float], Forward]:
        """Optimizer updates, one a mini-batch. Returns this rank's share of each metric (shares add up to it), and what
        `log_probs` would have returned, where the loss made use of it."""
        self.model.train()
        shares: dict[str, Tensor] = {}
        forwards: list[Forward] = []
        for mini_batch in mini_batches:
            for rows in mini_batch.passes:
                found, forward = self._backward(batch, rows, mini_batch.totals, loss)
                if rows:
                    _add(shares, found, 1 / len(mini_batches))
                    forwards += [forward] if loss.own_old_log_probs else []
            _add(shares, self._step(loss.grad_clip), 1 / len(mini_batches) / self.ranks)
        return {name: float(value) for name, value in shares.items()}, _joined(forwards)

    def _backward(
        self, batch: Batch, rows: list[int], totals: Totals, loss: LossConfig
    ) -> tuple[dict[str, Tensor], Forward]:
        """Forward and backward of one pass; a rank without rows keeps step with a loss of 0."""
        part = batch.select(rows or [0])
        wants_entropy = loss.entropy_coeff != 0 or loss.own_old_log_probs
        log_probs, entropies = self._forward(self.model, part, loss.temperature, wants_entropy)
        part = part.to(self.device)
        if loss.own_old_log_probs:
            part.old_log_probs = log_probs.detach()
        weights = token_weights(part, loss.aggregation, totals, loss.scale)
        per_token, statistics = find_policy_loss(loss.policy_loss)(log_probs, part, loss.clip)
        shares = {"pg_loss": (per_token * weights).sum()}
        total = shares["pg_loss"]
        if loss.entropy_coeff:
            shares["entropy_loss"] = (entropies * weights).sum()
            total = total - loss.entropy_coeff * shares["entropy_loss"]
        if loss.kl_coef:
            shares["kl_loss"] = (kl_estimate(log_probs, part.reference_log_probs, loss.kl_form) * weights).sum()
            total = total + loss.kl_coef * shares["kl_loss"]
        token_share = part.response_mask / max(totals.tokens, 1)
        shares |= {"loss": total} | {name: (value * token_share).sum() for name, value in statistics.items()}
        # FSDP averages over ranks; the divisors are those of the whole mini-batch already.
        (total * (self.ranks if rows else 0)).backward()
        return shares, (log_probs.detach(), entropies.detach() if entropies is not None else None)

    def _step(self, grad_clip: float) -> dict[str, Tensor]:
        """Clip and apply the gradient; one that is not finite is dropped and counted."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), grad_clip)
        norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        lr, finite = self.optimizers.lr, math.isfinite(norm)
        if self.config.fsdp.optimizer_offload:
            self.optimizers.to(self.device)
        self.optimizers.step() if finite else self.optimizers.skip()
        self.optimizers.zero_grad()
        if self.config.fsdp.optimizer_offload:
            self.optimizers.to(torch.device("cpu"))
        return {"grad_norm": torch.tensor(norm), "lr": torch.tensor(lr), "skipped_updates": torch.tensor(not finite)}

    def gradient(self, batch: Batch, mini_batch: MiniBatch, loss: LossConfig, padded: bool) -> dict[str, Tensor]:
        """The whole gradient of one mini-batch, by parameter name, without an update; for tests and diagnosis."""
        self.padded = padded
        self.model.train()
        for rows in mini_batch.passes:
            self._backward(batch, rows, mini_batch.totals, loss)
        found = {name: p.grad.full_tensor().cpu() for name, p in self.model.named_parameters() if p.grad is not None}
        self.optimizers.zero_grad()
        return found

    # -- weights ---------------------------------------------------------------------------------------------------

    def plan_weights(self, dtype: str, limit: int) -> list[Bucket]:
        """How the weights will be handed over in this type, in buckets of at most `limit` bytes."""
        self.rollout_dtype = getattr(torch, dtype)
        names = [(name, p.shape, self.rollout_dtype) for name, p in self.model.model.named_parameters()]
        self.buckets = plan_buckets(names, limit)
        self.buffer: SharedBuffer | None = None
        return self.buckets

    @torch.no_grad()
    def fill_bucket(self, index: int) -> tuple[Handle, int]:
        """Gather one bucket's weights into memory that the engine can open; collective. Returns handle and digest."""
        if self.buffer is None:
            reshard(self.model)
            self.buffer = SharedBuffer(max(bucket.bytes for bucket in self.buckets), self.device)
        bucket = self.buckets[index]
        parameters = dict(self.model.model.named_parameters())
        for place in bucket.tensors:
            value = parameters[place.name].detach().to(self.rollout_dtype)
            place.view(self.buffer.tensor).copy_(value.full_tensor())
        devices.synchronize(self.config.device)
        return self.buffer.handle, digest(self.buffer.tensor[: bucket.bytes])

    def release_buckets(self) -> None:
        """Free the hand-over's device memory; host memory is kept, as touching it anew costs more than it saves."""
        if self.config.device == "cuda" and self.buffer is not None:
            self.buffer.close()
            self.buffer = None
            devices.release_cached_memory(self.config.device)

    def offload(self, *, to_host: bool) -> dict[str, float]:
        """Move to or from host memory what the configuration says may leave the device. Returns memory in GiB."""
        target = torch.device("cpu") if to_host else self.device
        if self.config.fsdp.param_offload:
            self.model.to(target)
        if self.config.fsdp.optimizer_offload and to_host and self.optimizers:
            self.optimizers.to(target)
        devices.release_cached_memory(self.config.device)
        return devices.memory(self.config.device)

    @torch.no_grad()
    def export(self, directory: str, dtype: str) -> None:
        """Write the model as a Hugging Face directory, weights in this type; collective, rank 0 writes."""
        reshard(self.model)
        kept = getattr(torch, dtype)
        tensors = whole_tensors(self.model.model, kept)
        export_model(tensors, self.model.model, Path(directory), kept, writes=self.rank == 0)


def _add(shares: dict[str, Tensor], found: dict[str, Tensor], weight: float) -> None:
    """Add weighted values by name, without waiting for the device."""
    for name, value in found.items():
        shares[name] = shares.get(name, 0.0) + value.detach() * weight


def _joined(forwards: list[Forward]) -> Forward:
    """Several passes' results as one, in host memory; empty where there was no pass."""
    if not forwards:
        return torch.empty(0), torch.empty(0)
    log_probs = torch.cat([item[0] for item in forwards]).cpu()
    entropies = [item[1] for item in forwards if item[1] is not None]
    return log_probs, torch.cat(entropies).cpu() if entropies else None

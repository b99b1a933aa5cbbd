"""One training rank: an actor that holds a shard of the policy, and of reference and critic where there are any.

Does what the driver planned, on the rows it is given. Knows nothing of prompts as text, rewards or the rollout engine.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybridrl import device as devices
from hybridrl.algorithms.aggregation import Totals
from hybridrl.batch import Batch
from hybridrl.checkpoint.export import export_model, export_settings
from hybridrl.checkpoint.published import parts as parts_of
from hybridrl.config.model_directory import HUGGINGFACE
from hybridrl.config.schema import FSDPConfig, ModelConfig, OptimizerConfig, WrapPolicyConfig
from hybridrl.runtime.guard import begin_actor
from hybridrl.training.adapted import adapter_off, pairs
from hybridrl.training.bypass import apart
from hybridrl.training.fsdp import mesh, reshard, shard_and_fill, whole_tensors
from hybridrl.training.learner import Learner, Loss, MiniBatch, Shares, on_device, unchanged
from hybridrl.training.lora import add_adapter, export_adapter, export_adapter_settings, load_adapter
from hybridrl.training.losses import LossConfig, ValueLossConfig, critic_loss, foresight, policy_loss
from hybridrl.training.model import LanguageModel, blank_language_model, check_log_probs, rows_mix
from hybridrl.training.optimizer import Optimizers
from hybridrl.training.packing import ModelInputs, Passes, parts
from hybridrl.training.sender import Sender
from hybridrl.training.sequence_parallel import sequence_group
from hybridrl.training.state import load_state, state_of
from hybridrl.training.state_writer import Copied, StateWriter
from hybridrl.training.token_outputs import Head, ReferenceOutputs, TokenOutputs
from hybridrl.training.value_model import ValueModel, blank_value_model
from hybridrl.weights.handles import Handle
from hybridrl.weights.layout import Bucket, HandOver

# Outputs of a model by kind, for all rows of a rank; empty where a rank has no rows. Arrays, which Ray does not copy.
Columns = list[np.ndarray | None]


@dataclass(frozen=True)
class FrozenConfig:
    """The frozen model that the policy is compared with; `offload` keeps it in host memory.

    `refreshed` says that it will be made a copy of the policy, so that it must be of its shapes; `layers` are the
    classes to shard one by one, if they are named.
    """

    model: ModelConfig
    offload: bool
    refreshed: bool = False
    layers: tuple[str, ...] = ()


@dataclass(frozen=True)
class LearnerConfig:
    """A model that is trained; without an optimizer its gradient can be taken, but no step."""

    model: ModelConfig
    fsdp: FSDPConfig
    optimizer: OptimizerConfig
    total_updates: int
    updates_per_step: int = 1


@dataclass(frozen=True)
class WorkerConfig:
    """What a training rank is built from. `skipped_updates` is where rows of a skipped update are written."""

    device: str
    policy: LearnerConfig
    collective_timeout: float
    seed: int
    skipped_updates: str
    reference: FrozenConfig | None = None
    critic: LearnerConfig | None = None


class TrainWorker:
    def __init__(self, rank: int, ranks: int, log_file: str) -> None:
        self.rank, self.ranks = rank, ranks
        begin_actor(log_file)

    def place(self) -> dict[str, Any]:
        """Where this rank runs: node address, the port where the first rank listens, and the GPU that Ray gave."""
        address, port = ray.util.get_node_ip_address(), 0
        if self.rank == 0:
            self.listener = devices.listen(address)
            port = self.listener.getsockname()[1]
        return {"address": address, "port": port, "gpus": ray.get_gpu_ids()}

    def build(self, config: WorkerConfig, address: str) -> None:
        """Load and shard the models; collective."""
        self.config = config
        gpus = ray.get_gpu_ids()
        if config.device == "cuda" and gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = str(gpus[0])
        devices.seed_everything(config.seed)
        if any(learner.fsdp.full_determinism for learner in (config.policy, config.critic) if learner):
            devices.be_deterministic(config.device)
        listener = self.listener if self.rank == 0 else None
        devices.join_group(config.device, address, listener, self.rank, self.ranks, config.collective_timeout)
        self.device = devices.current(config.device)
        self.writer = StateWriter(config.device)
        blank = blank_language_model(config.policy.model, stored_type(config.policy))
        self.policy = self._learner(blank, config.policy, "actor")
        self._check(self.policy.model, config.policy)
        self.reference: LanguageModel | None = None
        if config.reference:
            self.reference = self._frozen(config.reference, config.policy)
        self.critic: Learner | None = None
        if config.critic:
            values = blank_value_model(config.critic.model, stored_type(config.critic))
            self.critic = self._learner(values, config.critic, "critic")

    def _learner(self, model: LanguageModel | ValueModel, config: LearnerConfig, name: str) -> Learner:
        settings = config.model
        if settings.lora_rank:
            kept = getattr(torch, config.fsdp.model_dtype)
            add_adapter(model.model, settings, kept, self.config.seed, f"the {name}'s model")
        sharded = self._load(model, settings, config.fsdp, offloaded=config.fsdp.offload_policy)
        if settings.lora_rank and settings.lora_adapter_path:
            load_adapter(sharded.model, Path(settings.lora_adapter_path))
        plan = {"dtype": computed_in(config), "updates_per_step": config.updates_per_step}
        # Under offload_policy the optimizer steps in host memory, where parameters and moments are already.
        offloaded = config.fsdp.optimizer_offload and not config.fsdp.offload_policy and self.device.type == "cuda"
        optimizers = Optimizers(sharded, config.optimizer, config.total_updates, **plan, offloaded=offloaded)
        evidence = Path(self.config.skipped_updates, name)
        group = sequence_group(config.fsdp.ulysses_sequence_parallel_size, self.config.collective_timeout)
        padded = not settings.use_remove_padding or (group is None and rows_mix(sharded, self.device))
        reshard(sharded)
        return Learner(sharded, optimizers, config.fsdp, self.device, padded=padded, evidence=evidence, group=group)

    def _frozen(self, config: FrozenConfig, policy: LearnerConfig) -> LanguageModel:
        """The reference, stored in the type that it computes in: it is never updated."""
        blank = blank_language_model(config.model, computed_in(policy))
        asked, present = ([(n, p.shape) for n, p in m.named_parameters()] for m in (blank, self.policy.model))
        if config.refreshed and asked != present:
            raise ValueError(
                f"actor_rollout_ref.ref.refresh_freq: the reference {config.model.path} has other shapes than the "
                f"policy {policy.model.path}, so it cannot become a copy of it; set refresh_freq=-1"
            )
        fsdp = replace(policy.fsdp, wrap_policy=WrapPolicyConfig(list(config.layers)))
        frozen = self._load(blank.requires_grad_(False), config.model, fsdp, offloaded=config.offload).eval()
        if config.model.path != policy.model.path:
            self._check(frozen, policy)
        return frozen

    def padded(self) -> dict[str, bool]:
        """Whether a learner's rows are laid out apart, as was asked for or as its layers need."""
        return {name: made.padded for name, made in (("actor", self.policy), ("critic", self.critic)) if made}

    def _load(
        self, blank: LanguageModel | ValueModel, model: ModelConfig, fsdp: FSDPConfig, *, offloaded: bool = False
    ) -> Any:
        grid = mesh(self.config.device, self.ranks, fsdp.fsdp_size)
        return shard_and_fill(blank, model.path, fsdp, grid, self.device, offloaded=offloaded)

    def _check(self, model: LanguageModel, config: LearnerConfig) -> None:
        padded, group = self.policy.padded, self.policy.group
        check_log_probs(model, computed_in(config), self.device, padded=padded, group=group)
        reshard(model)

    # -- passes over rows ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def log_probs(
        self,
        batch: Batch,
        passes: Passes,
        temperature: float,
        *,
        sum_pi_squared: bool = False,
        reference_kl: bool = False,
    ) -> Columns:
        """The policy's log-probs, entropies and what else is asked for, of the passes' rows: TokenOutputs' columns."""
        model = on_device(self.policy, self.critic).model.eval()
        found = []
        for part in parts(batch, passes):
            inputs = self.policy.inputs(part)
            against = self._reference_outputs(inputs) if reference_kl else None
            found.append(model(inputs, temperature, entropies=True, sum_pi_squared=sum_pi_squared, against=against))
        reshard(model)
        return joined(found, passes)

    @torch.no_grad()
    def reference_log_probs(self, batch: Batch, passes: Passes, temperature: float) -> Columns:
        """The reference's log-probs of the passes' rows: TokenOutputs' columns."""
        with self._as_reference() as model:
            found = [model(self.policy.inputs(part), temperature) for part in parts(batch, passes)]
        return joined(found, passes)

    @torch.no_grad()
    def values(self, batch: Batch, passes: Passes) -> Columns:
        """The critic's values of the passes' rows: one column."""
        model = on_device(self.critic, self.policy).model.eval()
        found = [(model(self.critic.inputs(part)),) for part in parts(batch, passes)]
        reshard(model)
        return joined(found, passes)

    def _reference_outputs(self, inputs: ModelInputs) -> ReferenceOutputs:
        """What the reference's head sees, and that head; collective."""
        with torch.no_grad(), self._as_reference() as model:
            hidden = model.hidden_states(inputs)
            head = model.head  # whole until the model is sharded again
            bias = None if head.bias is None else head.bias.clone()
            return ReferenceOutputs(hidden, Head(head.weight.clone(), bias, head.rule))

    @contextmanager
    def _as_reference(self) -> Iterator[LanguageModel]:
        """The reference: a model of its own, or the policy without its adapter."""
        model = self.reference or on_device(self.policy, self.critic).model
        training = model.training
        with adapter_off(model.model):
            yield model.eval()
        reshard(model)
        model.train(training)

    # -- updates ---------------------------------------------------------------------------------------------------

    def update_policy(
        self, batch: Batch, mini_batches: list[MiniBatch], loss: LossConfig, step: int
    ) -> tuple[list[Shares], Columns]:
        """Optimizer updates, one a mini-batch. Returns this rank's share of each one's metrics (shares add up), and
        what `log_probs` would have returned, where the loss made use of it."""
        self._seed(step)
        on_device(self.policy, self.critic)
        passed: list[TokenOutputs] = []
        reject, loss = apart(self.policy, loss)
        # Where what was passed is of use, there is one mini-batch; it is gone through again as a whole.
        options = {"repeats": passed.clear, "prepare": reject}
        compute = self._policy_loss(loss, passed)
        shares = self.policy.update(batch, mini_batches, compute, loss.grad_clip, step, **options)
        return shares, joined(passed, [rows for mini_batch in mini_batches for rows in mini_batch.passes])

    def update_critic(
        self, batch: Batch, mini_batches: list[MiniBatch], loss: ValueLossConfig, step: int
    ) -> list[Shares]:
        """Optimizer updates, one a mini-batch. Returns this rank's share of each one's metrics (shares add up)."""
        self._seed(step)
        return on_device(self.critic, self.policy).update(
            batch, mini_batches, self._critic_loss(loss), loss.grad_clip, step
        )

    def _seed(self, step: int) -> None:
        """Draw what dropout draws from the step alone, so that a run which went on from it draws the same."""
        devices.seed_everything(hash((self.config.seed, step, self.rank)) & 0x7FFFFFFF)

    def _policy_loss(self, loss: LossConfig, passed: list[TokenOutputs]) -> Loss:
        """The policy's loss as a function of rows. What the model says of them is added to `passed` where it stands for
        the old policy's."""
        options = {
            "entropies": loss.entropy_coeff != 0 or loss.own_old_log_probs or loss.tell_entropy,
            "entropy_gradient": loss.entropy_coeff != 0,
        }

        def compute(part: Batch, totals: Totals | None) -> tuple[Tensor, dict[str, Tensor]]:
            inputs = self.policy.inputs(part)
            against = self._reference_outputs(inputs) if loss.kl_form == "full" else None
            part = part.to(self.device)
            foreseen = None if totals is None else foresight(part, totals, loss)
            found = self.policy.model(inputs, loss.temperature, against=against, foresight=foreseen, **options)
            if loss.own_old_log_probs:
                passed.append(TokenOutputs(*(value if value is None else value.detach() for value in found)))
            if totals is None:
                return 0 * found.log_probs.sum(), {}
            return policy_loss(found, part, totals, loss)

        return compute

    def _critic_loss(self, loss: ValueLossConfig) -> Loss:
        """The critic's loss as a function of rows."""

        def compute(part: Batch, totals: Totals | None) -> tuple[Tensor, dict[str, Tensor]]:
            values = self.critic.model(self.critic.inputs(part))
            return (0 * values.sum(), {}) if totals is None else critic_loss(values, part.to(self.device), totals, loss)

        return compute

    def gradient(self, batch: Batch, mini_batch: MiniBatch, loss: LossConfig | ValueLossConfig, padded: bool) -> Any:
        """The whole gradient of one mini-batch, by parameter name, without an update; for tests and diagnosis."""
        policy = isinstance(loss, LossConfig)
        learner = on_device(*((self.policy, self.critic) if policy else (self.critic, self.policy)))
        learner.padded = padded
        reject, loss = apart(learner, loss) if policy else (unchanged, loss)
        function = self._policy_loss(loss, []) if policy else self._critic_loss(loss)
        return learner.whole_gradient(batch, mini_batch, function, reject)

    @torch.no_grad()
    def refresh_reference(self) -> None:
        """Make the reference a copy of the present policy."""
        reshard(self.policy.model)
        reshard(self.reference)
        for frozen, present in zip(self.reference.parameters(), self.policy.model.parameters(), strict=True):
            frozen.to_local().copy_(present.to_local())

    # -- weights ---------------------------------------------------------------------------------------------------

    def plan_weights(self, dtype: str, limit: int) -> HandOver:
        """How the weights will be handed over in this type, in buckets of at most `limit` bytes."""
        merge = self.config.policy.model.lora.merge
        self.sender = Sender(self.policy.model, self.device, getattr(torch, dtype), limit, merge)
        return self.sender.plan

    def fill_bucket(self, bucket: Bucket) -> tuple[Handle, int]:
        """Gather one bucket's weights into memory that the engine can open; collective. Returns handle and digest."""
        return self.sender.fill(bucket)

    def release_buckets(self, reader_died: bool = False) -> None:
        self.sender.release(reader_died=reader_died)

    def offload(self, *, to_host: bool, policy: bool = True, critic: bool = True) -> dict[str, float]:
        """Move to host memory what the configuration allows to leave the device, or only the policy back: the critic
        returns when it is used. Returns memory in GiB."""
        if not to_host:
            on_device(self.policy, self.critic)
        for learner, moves in ((self.policy, policy), (self.critic, critic)):
            if to_host and learner is not None and moves:
                learner.offload(to_host=True)
        devices.release_cached_memory(self.config.device)
        return devices.memory(self.config.device)

    @torch.no_grad()
    def export(self, directory: str, dtype: str, name: str) -> None:
        """Write a model (actor, critic or reference) as a Hugging Face directory, or its adapter as peft's, in the type
        that it is trained in; collective, rank 0 writes."""
        model, _ = self._trained(name)
        reshard(model)
        if pairs(model.model):
            return export_adapter(model.model, Path(directory), writes=self.rank == 0)
        kept = getattr(torch, dtype)
        tensors = whole_tensors(model.model, parts_of(model.model, kept))
        export_model(tensors, model.model, Path(directory), kept, writes=self.rank == 0)

    def start_save(self, directory: str, contents: dict[str, list[str]]) -> Copied:
        """Have parts of the state (model, optimizer, extra) of actor, critic or reference written to a folder of that
        name, while training goes on, with its configuration in huggingface/; collective. Then ask `finished_save`."""
        began, models = time.monotonic(), {Path(directory, name): self._trained(name) for name in contents}
        states = {folder: state_of(*models[folder], contents[folder.name]) for folder in models}
        copied = self.writer.start({folder: state for folder, state in states.items() if state})
        for folder, (model, _) in models.items():
            # Only now, since the ranks have to start alike also where the disk is full; `export` may have been here.
            if self.rank == 0 and not (folder / HUGGINGFACE).is_dir():
                self._export_settings(model.model, folder / HUGGINGFACE)
        return Copied(time.monotonic() - began, copied)

    def _export_settings(self, model: PreTrainedModel, directory: Path) -> None:
        if pairs(model):
            return export_adapter_settings(model, directory)
        # To the type that it computed in it is merged, whatever it is stored in.
        config = self.config.critic if directory.parent.name == "critic" else self.config.policy
        export_settings(model, directory, computed_in(config))

    def finished_save(self) -> bool:
        """Whether all is on the disk. Raises RuntimeError, once, where it could not be written."""
        return self.writer.finished()

    def load(self, directory: str, contents: dict[str, list[str]]) -> dict[str, int]:
        """Read parts of the state of actor, critic or reference from the folder of that name; collective. Returns how
        many updates each learner has had."""
        updates = {}
        for name, kept in contents.items():
            model, optimizers = self._trained(name)
            load_state(model, optimizers, kept, Path(directory, name), self.writer.group)
            if optimizers is not None:
                updates[name] = optimizers.updates
        return updates

    def _trained(self, name: str) -> tuple[LanguageModel | ValueModel, Optimizers | None]:
        if name == "reference":
            return self.reference, None
        learner = self.critic if name == "critic" else self.policy
        return learner.model, learner.optimizers


def computed_in(config: LearnerConfig) -> torch.dtype:
    return getattr(torch, config.fsdp.dtype or "float32")


def stored_type(config: LearnerConfig) -> torch.dtype:
    """Of a model's own parameters: beside an adapter they never change, and need no more than computing does."""
    return computed_in(config) if config.model.lora_rank else getattr(torch, config.fsdp.model_dtype)


def joined(found: Sequence[tuple[Tensor | None, ...]], passes: Passes) -> Columns:
    """Several passes' outputs end to end, in host memory; those of passes without rows are left out."""
    kept = [outputs for outputs, rows in zip(found, passes, strict=False) if rows]
    return [None if column[0] is None else torch.cat(column).cpu().numpy() for column in zip(*kept, strict=True)]

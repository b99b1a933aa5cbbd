"""One training rank: a Ray actor that holds a shard of the policy, and of reference and critic if they are configured.

Executes the driver's plans on its share of the rows. Knows neither text, rewards nor the rollout engine.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor, nn

from hybridrl.checkpoint.export import export_model, export_settings
from hybridrl.checkpoint.export import parts as parts_of
from hybridrl.config.files import HUGGINGFACE
from hybridrl.config.schema import CriticConfig, FSDPConfig, ModelConfig, ReferenceConfig
from hybridrl.core import device as devices
from hybridrl.core.batch import Batch
from hybridrl.core.rounding import rounded_otherwise
from hybridrl.core.spinning import give_way
from hybridrl.core.training import losses
from hybridrl.core.training import model as models
from hybridrl.core.training.attention import sequence_group
from hybridrl.core.training.fsdp import full_tensors, local, reshard, shard_and_fill
from hybridrl.core.training.layout import Layout, layout
from hybridrl.core.training.learner import Learner, LearnerConfig, Shares, on_device
from hybridrl.core.training.lora import add_adapter, export_adapter, export_adapter_settings, load_adapter
from hybridrl.core.training.losses import LossConfig
from hybridrl.core.training.model import LanguageModel
from hybridrl.core.training.optimizer import Optimizers
from hybridrl.core.training.packing import ModelInputs
from hybridrl.core.training.planning import MicroBatches, MiniBatch
from hybridrl.core.training.routes import RouterReplay
from hybridrl.core.training.state import Sender, StateWriter, load_state, state_of
from hybridrl.core.training.token_outputs import Head, ReferenceOutputs, TokenOutputs
from hybridrl.core.weights.buckets import Bucket, Handle, SyncPlan
from hybridrl.required import required
from hybridrl.runtime.guard import begin_actor

# A model's outputs for all rows of a rank, one array per kind; empty if the rank has no rows. Ray does not copy arrays.
Columns = list[np.ndarray | None]
Outputs = tuple[Tensor | None, ...]  # the same for one micro-batch


@dataclass(frozen=True)
class WorkerConfig:
    """The configuration of a training rank. Rows of skipped updates are written to the directory `skipped_updates`."""

    device: str
    policy: LearnerConfig
    collective_timeout: float
    seed: int
    skipped_updates: str
    reference: ReferenceConfig | None = None
    critic: LearnerConfig | None = None
    replays_routes: bool = False

    @property
    def reference_model(self) -> ModelConfig:
        """Return the reference's section: the policy's without an adapter, with the reference's path."""
        return replace(self.policy.model, path=required(self.reference).model.path, lora_rank=0)


def training_seed(*keys: int) -> int:
    """Return a seed for random numbers, derived from the run's seed and, for example, a step and a rank.

    Python hashes a tuple of integers to the same number in every process and, since 3.8, in every version of CPython
    on 64 bits. No document promises this, so a test checks three values: others would change how resumed runs shuffle.
    """
    return hash(keys) & 0x7FFFFFFF


class TrainWorker:
    def __init__(self, rank: int, ranks: int, log_file: str) -> None:
        self.rank, self.ranks = rank, ranks
        begin_actor(log_file)

    def location(self) -> dict[str, Any]:
        """Return the node's address, the listening port (0 except on the first rank), and the GPU assigned by Ray."""
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
        if config.device == "cpu":
            give_way()
        torch.manual_seed(config.seed)
        if any(learner.fsdp.full_determinism for learner in (config.policy, config.critic) if learner):
            devices.enable_determinism(config.device)
        self.device = devices.current(config.device)
        listener = self.listener if self.rank == 0 else None
        devices.join_group(config.device, address, listener, self.rank, self.ranks, config.collective_timeout)
        self.writer = StateWriter(config.device)
        self.policy = self._learner(models.blank_language_model, config.policy, "actor")
        self._check(self._language_model)
        if config.replays_routes:
            self._language_model.replay = RouterReplay(self._language_model.model)
            models.check_replay(self._language_model, self.device, padded=self.policy.padded, group=self.policy.group)
            reshard(self._language_model)
        self.reference = self._frozen(config.reference) if config.reference else None
        self.critic = self._learner(models.blank_value_model, config.critic, "critic") if config.critic else None

    @property
    def _language_model(self) -> LanguageModel:
        assert isinstance(self.policy.model, LanguageModel)
        return self.policy.model

    def _learner(self, blank: Any, config: LearnerConfig, name: str) -> Learner:
        """Shard a model without weights, with its adapter if it has one, load it and create its optimizers."""
        section, fsdp, seconds = config.model, config.fsdp, self.config.collective_timeout
        model, meshes = blank(section, config.storage_dtype), self._layout(fsdp)
        if section.lora_rank:
            dtype = getattr(torch, fsdp.model_dtype)
            add_adapter(model.model, section, dtype, self.config.seed, f"the {name}'s model")
        model = shard_and_fill(model, section.path, fsdp, meshes, self.device, offloaded=fsdp.offload_policy)
        if section.lora_rank and section.lora_adapter_path:
            load_adapter(model.model, Path(section.lora_adapter_path))
        # Under offload_policy the optimizer steps in host memory, where parameters and moments already are.
        offloaded = fsdp.optimizer_offload and not fsdp.offload_policy and self.device.type == "cuda"
        updates = config.total_updates, config.compute_dtype, config.updates_per_step
        optimizers = Optimizers(model, config.optimizer, *updates, offloaded=offloaded)
        group = sequence_group(fsdp.ulysses_sequence_parallel_size, seconds, meshes.tensor_ranks)
        padded = not section.use_remove_padding or (group is None and models.packed_rows_interact(model, self.device))
        reshard(model)
        dumps = Path(self.config.skipped_updates, name)
        return Learner(model, optimizers, fsdp, self.device, padded, dumps, group, meshes.tensor_ranks)

    def _layout(self, fsdp: FSDPConfig) -> Layout:
        sizes = fsdp.fsdp_size, fsdp.tensor_parallel_size, fsdp.expert_parallel_size
        return layout(self.config.device, self.ranks, *sizes)

    def _frozen(self, config: ReferenceConfig) -> LanguageModel:
        """Build the reference. It is never trained, so it is stored in its type of computation."""
        policy, path = self.config.policy, config.model.path
        blank = models.blank_language_model(self.config.reference_model, policy.compute_dtype)
        ours, theirs = ([(n, p.shape) for n, p in m.named_parameters()] for m in (blank, self.policy.model))
        if config.refresh_freq > 0 and ours != theirs:
            raise ValueError(
                f"actor_rollout_ref.ref.refresh_freq: the reference {path} has other shapes than the "
                f"policy {policy.model.path}, so it cannot become a copy of it; set refresh_freq=-1"
            )
        fsdp = replace(policy.fsdp, wrap_policy=config.fsdp_config.wrap_policy)
        blank, meshes = blank.requires_grad_(False), self._layout(fsdp)
        offloaded = config.fsdp_config.param_offload
        frozen = shard_and_fill(blank, path, fsdp, meshes, self.device, offloaded=offloaded).eval()
        if path != policy.model.path:
            self._check(frozen)
        return frozen

    def _check(self, model: LanguageModel) -> None:
        options = {"padded": self.policy.padded, "group": self.policy.group}
        models.check_log_probs(model, self.config.policy.compute_dtype, self.device, **options)
        reshard(model)

    def padded(self) -> dict[str, bool]:
        """Return whether each learner's rows are padded, by configuration or because its layers require it."""
        return {name: model.padded for name, model in (("actor", self.policy), ("critic", self.critic)) if model}

    # -- forward passes --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def log_probs(
        self, batch: Batch, micro_batches: MicroBatches, temperature: float, rounding: str = "", **more: bool
    ) -> Columns:
        """Return the policy's log-probs, entropies and `more` (`OutputSpec`, `reference_kl`) for these rows, as
        TokenOutputs; with `rounding` (a type), from an equally valid computation that rounds differently in it."""
        model = on_device(self.policy, self.critic).model.eval()
        reference_kl = more.pop("reference_kl", False)

        def compute(part: Batch) -> TokenOutputs:
            inputs = self.policy.inputs(part)
            against = self._reference_outputs(inputs) if reference_kl else None
            return model(inputs, temperature, entropies=True, against=against, **more)

        with rounded_otherwise(rounding) if rounding else nullcontext():
            return columns_of(model, compute, batch, micro_batches)

    @torch.no_grad()
    def reference_log_probs(self, batch: Batch, micro_batches: MicroBatches, temperature: float) -> Columns:
        """Return the reference's log-probs for these rows, as TokenOutputs."""
        with self._as_reference() as model:
            return columns_of(model, lambda part: model(self.policy.inputs(part), temperature), batch, micro_batches)

    @torch.no_grad()
    def values(self, batch: Batch, micro_batches: MicroBatches) -> Columns:
        """Return the critic's values for these rows, as one column."""
        model = on_device(required(self.critic), self.policy).model.eval()
        return columns_of(model, lambda part: (model(required(self.critic).inputs(part)),), batch, micro_batches)

    def _reference_outputs(self, inputs: ModelInputs) -> ReferenceOutputs:
        """Return the reference's hidden states and head; collective."""
        with torch.no_grad(), self._as_reference() as model:
            hidden = model.hidden_states(replace(inputs, carried={}))  # without the policy's experts
            weight, bias, rule = model.head  # unsharded until the model is resharded
            return ReferenceOutputs(hidden, Head(weight.clone(), None if bias is None else bias.clone(), rule))

    @contextmanager
    def _as_reference(self) -> Iterator[LanguageModel]:
        """Yield the reference: a separate model, or the policy with its adapter turned off."""
        if self.reference is None:
            on_device(self.policy, self.critic)
        model = self.reference or self._language_model
        training = model.training
        with models.adapter_off(model.model):
            model.eval()
            yield model
        reshard(model)
        model.train(training)

    # -- updates ---------------------------------------------------------------------------------------------------

    def update_policy(
        self, batch: Batch, mini_batches: list[MiniBatch], loss: LossConfig, step: int
    ) -> tuple[list[Shares], Columns]:
        """Run one optimizer update per mini-batch. Returns this rank's share of each update's metrics (shares add up),
        and the outputs of `log_probs` if the loss used them as the old policy's."""
        self._seed(step, on_device(self.policy, self.critic))
        outputs: list[TokenOutputs] = []
        reject, loss = losses.prepare_rejection(self.policy, loss)
        compute = losses.policy_objective(self.policy, loss, self._reference_outputs, outputs)
        # The outputs are used only if there is a single mini-batch: a retry repeats all of them.
        options = {"on_retry": outputs.clear, "prepare": reject}
        shares = self.policy.update(batch, mini_batches, compute, loss.grad_clip, step, **options)
        if self.config.device == "cpu":  # supervised runs have no weight sync, before which ranks give memory back
            devices.release_host_memory(devices.KEPT_BYTES, times_used=1)
        return shares, concatenated(outputs, [rows for part in mini_batches for rows in part.micro_batches])

    def update_critic(
        self, batch: Batch, mini_batches: list[MiniBatch], section: CriticConfig, step: int
    ) -> list[Shares]:
        """Run one optimizer update per mini-batch. Returns this rank's share of each update's metrics."""
        learner = on_device(required(self.critic), self.policy)
        self._seed(step, learner)
        return learner.update(batch, mini_batches, losses.critic_objective(learner, section), section.grad_clip, step)

    def _seed(self, step: int, learner: Learner) -> None:
        """Derive dropout's random numbers from seed, step and rank, so that a resumed run repeats them; the ranks of a
        tensor group have the same numbers."""
        torch.manual_seed(training_seed(self.config.seed, step, self.rank // learner.tensor_ranks))

    def gradient_norms(self, batch: Batch, mini_batches: list[MiniBatch], loss: LossConfig) -> list[float]:
        """Return the norm of the policy's gradient of each mini-batch, without an update; for diagnosis."""
        learner = on_device(self.policy, self.critic)
        objective = losses.policy_objective(learner, loss, self._reference_outputs, [])
        return learner.gradient_norms(batch, mini_batches, objective)

    @torch.no_grad()
    def refresh_reference(self) -> None:
        """Overwrite the reference with the current policy."""
        reshard(self.policy.model)
        reshard(required(self.reference))
        for frozen, present in zip(required(self.reference).parameters(), self.policy.model.parameters(), strict=True):
            local(frozen).copy_(local(present))

    # -- weights ---------------------------------------------------------------------------------------------------

    def plan_weights(self, dtype: str, limit: int) -> SyncPlan:
        """Plan the weight sync in this type; two buckets together take at most `limit` bytes."""
        merge = self.config.policy.model.lora.merge
        self.sender = Sender(self._language_model, self.device, getattr(torch, dtype), limit, merge)
        return self.sender.plan

    def fill_bucket(self, bucket: Bucket, shared: bool) -> tuple[Handle | None, int]:
        """Gather a bucket's weights; collective. Returns the memory's handle, if an engine is to open it, and the
        digest."""
        return self.sender.fill(bucket, shared=shared)

    def release_buckets(self, reader_died: bool = False) -> None:
        self.sender.release(reader_died=reader_died)

    def listen(self) -> str:
        """Listen for engines that are to form a group with this rank; return the address."""
        address = ray.util.get_node_ip_address()
        self.listener = devices.listen(address)
        return f"{address}:{self.listener.getsockname()[1]}"

    def join_engines(self, address: str, size: int, seconds: float) -> None:
        """Form a group with engines on other devices, as its first rank."""
        self.engines = devices.BroadcastGroup(self.config.device, address, self.listener, 0, size, seconds)

    def send_bucket(self, bucket: Bucket) -> None:
        """Send a filled bucket to all engines of the group."""
        self.engines.broadcast(self.sender.bytes_of(bucket))

    def offload(self, *, to_host: bool, policy: bool = True, critic: bool = True) -> dict[str, float]:
        """Move the models that may leave the device to host memory, or only the policy back: the critic returns when it
        is used. Returns memory in GiB."""
        if not to_host:
            on_device(self.policy, self.critic)
        for learner, moves in ((self.policy, policy), (self.critic, critic)):
            if to_host and learner is not None and moves:
                learner.offload(to_host=True)
        devices.release_cached_memory(self.config.device)
        return devices.memory(self.config.device)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def export(self, directory: str, dtype: str, name: str) -> None:
        """Write a model (actor, critic or reference) as a Hugging Face directory of this type, or its adapter in peft's
        format and in the type in which it is trained; collective, rank 0 writes."""
        model, _ = self._trained(name)
        reshard(model)
        if models.pairs(model.model):
            return export_adapter(model.model, Path(directory), writes=self.rank == 0)
        kept = getattr(torch, dtype)
        tensors = full_tensors(model.model, parts_of(model.model, kept))
        export_model(tensors, model.model, Path(directory), kept, writes=self.rank == 0)

    def start_save(self, directory: str, contents: dict[str, list[str]]) -> int:
        """Start writing parts of the state (model, optimizer, extra) of actor, critic or reference in the background to
        a folder of that name, with the model's configuration in huggingface/; collective. Poll `finished_save` for the
        end. Returns the bytes of state copied to host memory."""
        folders = {Path(directory, name): self._trained(name) for name in contents}
        states = {folder: state_of(*folders[folder], contents[folder.name]) for folder in folders}
        copied = self.writer.start({folder: state for folder, state in states.items() if state})
        for folder, (model, _) in folders.items():
            # After `start`, which must be reached by all ranks even if the disk is full. `export` may have written it.
            settings = folder / HUGGINGFACE
            if self.rank != 0 or settings.is_dir():
                continue
            if models.pairs(model.model):
                export_adapter_settings(model.model, settings)
            else:  # merging a checkpoint gives the compute type, whatever type is stored
                config = self.config.critic if folder.name == "critic" else self.config.policy
                export_settings(model.model, settings, required(config).compute_dtype)
        return copied

    def finished_save(self) -> bool:
        """See `StateWriter.finished`."""
        return self.writer.finished()

    def load(self, directory: str, contents: dict[str, list[str]]) -> dict[str, int]:
        """Read parts of the state of actor, critic or reference from the folder of that name; collective. Returns each
        learner's number of updates."""
        updates = {}
        for name, kept in contents.items():
            model, optimizers = self._trained(name)
            load_state(model, optimizers, kept, Path(directory, name), self.writer.group)
            if optimizers is not None:
                updates[name] = optimizers.updates
        return updates

    def _trained(self, name: str) -> tuple[Any, Any]:
        """Return a model, and its optimizers if it has any."""
        if name == "reference":
            return self.reference, None
        learner = self.critic if name == "critic" else self.policy
        return required(learner).model, required(learner).optimizers


def columns_of(model: nn.Module, compute: Callable[[Batch], Outputs], batch: Batch, rows: MicroBatches) -> Columns:
    """Return the outputs for these rows; an empty micro-batch runs one dummy row, so that collectives stay aligned."""
    columns = concatenated([compute(batch.select(each or [0])) for each in rows], rows)
    reshard(model)
    return columns


def concatenated(outputs: Sequence[Outputs], micro_batches: MicroBatches) -> Columns:
    """Concatenate the micro-batches' outputs in host memory, leaving out those of dummy rows."""
    kept = [output for output, rows in zip(outputs, micro_batches, strict=False) if rows]
    return [None if column[0] is None else torch.cat(column).cpu().numpy() for column in zip(*kept, strict=True)]

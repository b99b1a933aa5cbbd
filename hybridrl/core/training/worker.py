"""One training rank: a Ray actor with a shard of each model; the policy is one of them.

Executes the driver's plans on its share of the rows. Knows neither text, rewards nor the rollout engine.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

from hybridrl.checkpoint.export import export_model, export_settings
from hybridrl.checkpoint.export import parts as parts_of
from hybridrl.config.files import HUGGINGFACE
from hybridrl.config.schema import CriticConfig
from hybridrl.core import device as devices
from hybridrl.core.algorithms.algorithm import ForwardSpec
from hybridrl.core.batch import Batch
from hybridrl.core.pictures import Pixels
from hybridrl.core.rounding import rounded_otherwise
from hybridrl.core.spinning import give_way
from hybridrl.core.training import losses
from hybridrl.core.training import model as models
from hybridrl.core.training.building import WorkerConfig, build_shards
from hybridrl.core.training.fsdp import full_tensors, local, reshard
from hybridrl.core.training.heads import Head, ReferenceOutputs
from hybridrl.core.training.learner import BatchLoss, Learner, ModelShard, Shares
from hybridrl.core.training.lora import export_adapter, export_adapter_settings
from hybridrl.core.training.losses import LossConfig
from hybridrl.core.training.model import LanguageModel
from hybridrl.core.training.optimizer import Optimizers
from hybridrl.core.training.packing import ModelInputs
from hybridrl.core.training.planning import MicroBatches, MiniBatch, training_seed
from hybridrl.core.training.state import Sender, StateWriter, load_state, state_of
from hybridrl.core.training.token_outputs import TokenOutputs
from hybridrl.core.weights.buckets import Bucket, Handle, SyncPlan
from hybridrl.runtime.guard import begin_actor

# A model's outputs for all rows of a rank, one array per kind; empty if the rank has no rows. Ray does not copy arrays.
Columns = list[np.ndarray | None]
MicroBatchOutputs = tuple[Tensor | None, ...]  # the same for one micro-batch


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
        if any(entry.fsdp.full_determinism for entry in config.models.values() if entry.trained):
            devices.enable_determinism(config.device)
        self.device = devices.current(config.device)
        listener = self.listener if self.rank == 0 else None
        devices.join_group(config.device, address, listener, self.rank, self.ranks, config.collective_timeout)
        self.writer = StateWriter(config.device)
        self.models = build_shards(config, self.ranks, self.device)

    @property
    def actor(self) -> Learner:
        return self._learner("actor")

    @property
    def _policy(self) -> LanguageModel:
        assert isinstance(self.actor.model, LanguageModel)
        return self.actor.model

    def _learner(self, name: str) -> Learner:
        learner = self.models[name]
        assert isinstance(learner, Learner)
        return learner

    def see(self, pixels: Mapping[int, ray.ObjectRef]) -> None:
        """Keep the handles of the pixels of a batch, by digest; each rank fetches those of its micro-batches."""

        def fetch(digests: Sequence[int]) -> list[Pixels]:
            return ray.get([pixels[digest] for digest in digests])

        for shard in self.models.values():
            if shard.vision is not None:
                shard.vision.fetch = fetch

    def layouts(self) -> dict[str, dict[str, bool]]:
        """Return whether each model's rows are padded, by configuration or because its layers require it; and whether
        they share tokens."""
        return {name: {"padded": shard.padded, "shares": shard.shares} for name, shard in self.models.items()}

    # -- forward passes --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(
        self,
        name: str,
        batch: Batch,
        micro_batches: MicroBatches,
        spec: ForwardSpec | None = None,
        rounding: str = "",
    ) -> tuple[Columns, int]:
        """Return a model's outputs for these rows: those of the spec in the order of `TokenOutputs`, or values as one
        column; with `rounding` (a type), from an equally valid computation that rounds differently in it. And how many
        tokens it computed."""
        spec, computed = spec or ForwardSpec(), 0
        self._on_device(name, spec.against)
        with self._in_use(name) as shard, rounded_otherwise(rounding) if rounding else nullcontext():

            def compute(rows: Sequence[int]) -> MicroBatchOutputs:
                nonlocal computed
                part = batch.select(rows or [0])
                inputs = shard.inputs(part)
                computed += inputs.computed if rows else 0
                if not isinstance(shard.model, LanguageModel):
                    return (shard.model(inputs),)
                against = self.hidden_of(spec.against, self.models[spec.against].inputs(part)) if spec.against else None
                options = {"entropies": spec.entropies, "sum_pi_squared": spec.sum_pi_squared, "against": against}
                return shard.model(inputs, spec.temperature, **options)

            return concatenated([compute(rows) for rows in micro_batches], micro_batches), computed

    @torch.no_grad()
    def hidden_of(self, name: str, inputs: ModelInputs) -> ReferenceOutputs:
        """Return a model's hidden states and head, for a micro-batch of another model; collective."""
        with self._in_use(name) as shard:
            assert isinstance(shard.model, LanguageModel)
            hidden = shard.model.hidden_states(inputs)
            weight, bias, rule = shard.model.head  # unsharded until the model is resharded
            return ReferenceOutputs(hidden, Head(weight.clone(), None if bias is None else bias.clone(), rule))

    @contextmanager
    def _in_use(self, name: str) -> Iterator[ModelShard]:
        """Yield a model for forward passes without a gradient; a base has its adapter turned off."""
        shard, base = self.models[name], self.config.models[name].weights == "base"
        model = shard.model
        training = model.training
        with models.adapter_off(model.model) if base else nullcontext():
            model.eval()
            yield shard
        reshard(model)
        model.train(training)

    def _on_device(self, *names: str) -> None:
        """Offload the parameters of other trained models that may leave the device, then bring those of these models
        back. For a frozen model alone nothing moves."""
        used = [self.models[name].model for name in names if name]
        learners = [shard for shard in self.models.values() if isinstance(shard, Learner)]
        present = [learner for learner in learners if learner.model in used]
        for learner in learners:
            if present and learner not in present:
                learner.offload(to_host=True)
        for learner in present:
            learner.offload(to_host=False)

    # -- updates ---------------------------------------------------------------------------------------------------

    def update_policy(
        self, batch: Batch, mini_batches: list[MiniBatch], loss: LossConfig, step: int
    ) -> tuple[list[Shares], Columns]:
        """Run one optimizer update per mini-batch. Returns this rank's share of each update's metrics (shares add up),
        and the outputs for all rows if the loss used them as the old policy's."""
        self._begin_updates(step, "actor", loss.against)
        outputs: list[TokenOutputs] = []
        reject, loss = losses.prepare_rejection(self.actor, loss)
        compute = self.objective(loss, outputs)
        # The outputs are used only if there is a single mini-batch: a retry repeats all of them.
        options = {"on_retry": outputs.clear, "prepare": reject}
        shares = self.actor.update(batch, mini_batches, compute, loss.grad_clip, step, **options)
        if self.config.device == "cpu":  # supervised runs have no weight sync, before which ranks give memory back
            devices.release_host_memory(devices.KEPT_BYTES, times_used=1)
        return shares, concatenated(outputs, [rows for part in mini_batches for rows in part.micro_batches])

    def objective(self, loss: LossConfig, outputs: list[TokenOutputs]) -> BatchLoss:
        """Return the policy's loss (see `policy_objective`)."""
        self.actor.against = {name: self.models[name] for name in (loss.against,) if name}
        self.actor.teachers = {name: self.models[name] for name in loss.teachers}
        return losses.policy_objective(self.actor, loss, self.hidden_of, outputs)

    def update_critic(
        self, batch: Batch, mini_batches: list[MiniBatch], section: CriticConfig, step: int
    ) -> list[Shares]:
        """Run one optimizer update per mini-batch. Returns this rank's share of each update's metrics."""
        self._begin_updates(step, "critic")
        learner = self._learner("critic")
        return learner.update(batch, mini_batches, losses.critic_objective(learner, section), section.grad_clip, step)

    def update_pairs(
        self, batch: Batch, mini_batches: list[MiniBatch], center: float, clip: float, step: int
    ) -> list[Shares]:
        """Run one update of a reward model on pairs of rows. Returns this rank's share of the metrics."""
        self._begin_updates(step, "actor")
        return self.actor.update(batch, mini_batches, losses.pair_objective(self.actor, center), clip, step)

    def _begin_updates(self, step: int, name: str, against: str = "") -> None:
        """Bring the models to the device, and derive dropout's random numbers from seed, step and rank, so that a
        resumed run repeats them; the ranks of a tensor group have the same numbers."""
        self._on_device(name, against)
        torch.manual_seed(training_seed(self.config.seed, step, self.rank // self.models[name].tensor_ranks))

    def gradient_norms(self, batch: Batch, mini_batches: list[MiniBatch], loss: LossConfig) -> list[float]:
        """Return the norm of the policy's gradient of each mini-batch, without an update; for diagnosis."""
        self._on_device("actor", loss.against)
        return self.actor.gradient_norms(batch, mini_batches, self.objective(loss, []))

    @torch.no_grad()
    def refresh(self, name: str, share: float) -> None:
        """Move the weights of a copy towards those of the current policy; a share of 1 makes them equal."""
        copy, policy = self.models[name].model, self.actor.model
        reshard(policy)
        reshard(copy)
        for frozen, present in zip(copy.parameters(), policy.parameters(), strict=True):
            ours = local(frozen)
            ours.lerp_(local(present).to(ours), share)

    # -- weights ---------------------------------------------------------------------------------------------------

    def plan_weights(self, dtype: str, limit: int) -> SyncPlan:
        """Plan the weight sync in this type; two buckets together take at most `limit` bytes, unless a
        layer alone takes more than half of it."""
        merge = self.config.models["actor"].model.lora.merge
        self.sender = Sender(self._policy, self.device, getattr(torch, dtype), limit, merge)
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

    def offload(self, *, to_host: bool, actor: bool = True, others: bool = True) -> dict[str, float]:
        """Move the trained models that may leave the device to host memory, or only the actor back: others return when
        they are used. Returns memory in GiB."""
        if not to_host:
            self._on_device("actor")
        for name, shard in self.models.items():
            if to_host and isinstance(shard, Learner) and (actor if name == "actor" else others):
                shard.offload(to_host=True)
        devices.release_cached_memory(self.config.device)
        return devices.memory(self.config.device)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def export(self, directory: str, dtype: str, name: str) -> None:
        """Write a model as a Hugging Face directory of this type, or its adapter in peft's format and in the type in
        which it is trained; collective, rank 0 writes."""
        model: Any = self.models[name].model
        reshard(model)
        if models.pairs(model.model):
            return export_adapter(model.model, Path(directory), writes=self.rank == 0)
        weight_dtype = getattr(torch, dtype)
        tensors = full_tensors(model.model, parts_of(model.model, weight_dtype))
        export_model(tensors, model.model, Path(directory), weight_dtype, writes=self.rank == 0)

    def start_save(self, directory: str, contents: dict[str, list[str]]) -> int:
        """Start writing parts of the state (model, optimizer, extra) of models in the background, each to a folder of
        its name, with the model's configuration in huggingface/; collective. Poll `finished_save` for the end. Returns
        the bytes of state copied to host memory."""
        states = {name: state_of(*self._trained(name), parts) for name, parts in contents.items()}
        copied = self.writer.start({Path(directory, name): state for name, state in states.items() if state})
        for name in contents:
            # After `start`, which must be reached by all ranks even if the disk is full. `export` may have written it.
            settings, (model, _) = Path(directory, name, HUGGINGFACE), self._trained(name)
            if self.rank != 0 or settings.is_dir():
                continue
            if models.pairs(model.model):
                export_adapter_settings(model.model, settings)
            else:  # merging a checkpoint gives the compute type, whatever type is stored
                export_settings(model.model, settings, self.config.models[name].compute_dtype)
        return copied

    def finished_save(self) -> bool:
        """See `StateWriter.finished`."""
        return self.writer.finished()

    def load(self, directory: str, contents: dict[str, list[str]]) -> dict[str, int]:
        """Read parts of the state of models, each from the folder of its name; collective. Returns each learner's
        number of updates."""
        updates = {}
        for name, parts in contents.items():
            model, optimizers = self._trained(name)
            load_state(model, optimizers, parts, Path(directory, name), self.writer.group)
            if optimizers is not None:
                updates[name] = optimizers.updates
        return updates

    def _trained(self, name: str) -> tuple[Any, Optimizers | None]:
        """Return a model, and its optimizers if it is trained."""
        shard = self.models[name]
        return shard.model, shard.optimizers if isinstance(shard, Learner) else None


def concatenated(outputs: Sequence[MicroBatchOutputs], micro_batches: MicroBatches) -> Columns:
    """Concatenate the micro-batches' outputs in host memory, leaving out those of dummy rows."""
    real = [output for output, rows in zip(outputs, micro_batches, strict=False) if rows]
    return [None if column[0] is None else torch.cat(column).cpu().numpy() for column in zip(*real, strict=True)]

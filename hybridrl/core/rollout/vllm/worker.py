"""The part of the vLLM engine that runs in vLLM's processes, next to the model. Weights and adapters are loaded from
memory shared by a trainer on the same device, or received from the first training rank if that is on another device.
CUDA and CPU use the same path.

vLLM imports this module in each engine process before the model is built, and calls it through its weight-transfer
interface. An adapter's id in the engine is the id of the weight sync, and part of every request: an engine without this
adapter fails, whereas with a fixed id it would respond with its old adapter.
"""

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.core.sched.output import SchedulerOutput

from hybridrl.config.custom_code import import_libraries
from hybridrl.config.files import ADAPTER_CONFIG
from hybridrl.core import device as devices
from hybridrl.core.rollout.vllm import repairs  # its import also repairs vLLM
from hybridrl.core.weights.buckets import BucketReader, Handle
from hybridrl.runtime.guard import end_with_parent
from hybridrl.runtime.stacks import write_stacks_on_request

BACKEND = "hybridrl"
LIBRARIES = "HYBRIDRL_EXTERNAL_LIB"
MISSING_PATH = "/an/adapter/comes/from/memory"  # an engine without the adapter looks here

# A layer with LoRA: its parent, its name there, and itself.
AdaptedLayer = tuple[torch.nn.Module, str, BaseLayerWithLoRA]


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """Nothing needs to be agreed on beforehand."""


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """A bucket in the trainers' memory: its tensors' layout, and one handle and one digest per device. Without a handle
    it is received from the first rank of the group."""

    tensors: list[dict[str, Any]] = field(default_factory=list)
    start: int = 0
    size: int = 0
    handles: list[Handle | None] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)


class BucketTransfer(WeightTransferEngine[NoInitInfo, BucketInfo]):
    """Loads weights out of the trainers' memory, or receives them from it."""

    init_info_cls = NoInitInfo
    update_info_cls = BucketInfo

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        end_with_parent(os.getppid(), signal.SIGKILL)
        self.reader = BucketReader(self.device)
        self.begun = False  # whether an update is in progress: until its end the layers are not the model's
        self.adapted: list[AdaptedLayer] = []  # layers taken out of the model while its base is loaded

    def start_weight_update(self) -> None:
        self.begun = True
        self.adapted += unwrap_adapted_layers(self.model)
        if self.device.type == "cpu":
            # Experts compute with packed weights, which are packed again only if their kernel is created again.
            for module in self.model.modules():
                if isinstance(module, UnquantizedFusedMoEMethod):
                    module.moe_kernel = None
                # The reload packs a head's weight again: of 262,144 rows the old copy is as large as the layers.
                if isinstance(module, VocabParallelEmbedding):
                    vars(module).pop("cpu_linear", None)
        repairs.name_weight_loaders(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: BucketInfo) -> None:
        self.model.load_weights(self.open_bucket(update_info))
        devices.synchronize(self.device.type)  # copies may still read this bucket, which the trainer overwrites next

    def open_bucket(self, update_info: BucketInfo) -> list[tuple[str, torch.Tensor]]:
        return self.reader.read(get_tensor_model_parallel_rank(), vars(update_info))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            # A head tied to the embedding computes with a packed copy of its weight, which a reload leaves stale.
            for module in self.model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)
            devices.release_cached_memory("cpu")  # materialised and packed weights of the reload
        wrap_adapted_layers(self.adapted)
        self.reader.close()
        self.begun = False

    def shutdown(self) -> None:
        self.reader.close()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Required by vLLM 0.26; here the train worker sends."""
        raise NotImplementedError("weights are sent by TrainWorker.fill_bucket")


class EngineProcess:
    """vLLM's `worker_extension_cls`: its methods become methods of vLLM's worker, which has `weight_transfer_engine`
    and `model_runner`."""

    weight_transfer_engine: Any
    model_runner: Any
    finish_weight_update: Any
    adapter: dict[str, torch.Tensor] | None = None  # tensors of the next adapter that have arrived

    def finish_weights(self) -> None:
        """Finish a weight update: all weights have arrived, or a process has died and the next update sends all of
        them. After a failed bucket vLLM considers the update ended, but leaves its layers as they are: weights of the
        next update would be counted to this one. RuntimeError if no update has begun."""
        if not self.weight_transfer_engine.begun:
            raise RuntimeError("no weight update has begun")
        self._weight_update_active = True
        self.finish_weight_update()

    def join_trainer(self, address: str, first_rank: int, size: int, seconds: float) -> None:
        rank = first_rank + get_tensor_model_parallel_rank()
        self.weight_transfer_engine.reader.join(address, rank, size, seconds)

    def load_adapter_bucket(self, info: dict[str, Any]) -> None:
        tensors = self.weight_transfer_engine.open_bucket(BucketInfo(**info))
        self.adapter = (self.adapter or {}) | {name: tensor.cpu().clone() for name, tensor in tensors}

    def finish_adapter(self, sync_id: int, settings: dict[str, Any]) -> None:
        tensors, self.adapter = self.adapter or {}, None
        self.weight_transfer_engine.reader.close()
        replace_adapter(self.model_runner.lora_manager, tensors, sync_id, settings)

    def mask_tokens(self, ids: Sequence[int]) -> None:
        """Give these tokens no probability, in samples and in the log-probs of prompts. Requests cannot undo it."""
        model = self.model_runner.get_model()
        compute, masked = model.compute_logits, torch.tensor(ids, device=self.weight_transfer_engine.device)

        def compute_logits(*arguments: Any, **options: Any) -> torch.Tensor | None:
            logits = compute(*arguments, **options)  # None, if another device has them
            return None if logits is None else logits.index_fill_(-1, masked, -torch.inf)

        model.compute_logits = compute_logits

    def deliver_routes(self) -> None:
        """Make every iteration deliver the experts of its tokens. On CUDA vLLM does so by itself. On CPU it uses its
        older model runner, which does not use vLLM's connector for them."""
        RouteDelivery(self.model_runner)


# -- routes ------------------------------------------------------------------------------------------------------------


class RouteDelivery:
    """Delivery of routes by vLLM's first model runner, as by its second one: vLLM's own connector records each token's
    experts, keeps those of cached prefixes, and returns them with the output."""

    def __init__(self, runner: Any) -> None:
        connecting = import_module("vllm.distributed.aux_output_connector.worker")  # since 0.32
        self.connector = connecting.get_aux_output_connector(runner.model, runner.vllm_config, runner.kv_cache_config)
        self.runner, self.execute, self.sample = runner, runner.execute_model, runner.sample_tokens
        runner.execute_model, runner.sample_tokens = self.execute_model, self.sample_tokens

    def execute_model(self, scheduler_output: SchedulerOutput, *arguments: Any) -> Any:
        self.connector.begin_step(scheduler_output.aux_output_connector_metadata)
        self.pending, output = None, self.execute(scheduler_output, *arguments)
        if scheduler_output.total_num_scheduled_tokens:
            rows, count = self.runner.input_batch, self.runner.input_batch.num_reqs
            scheduled = [scheduler_output.num_scheduled_tokens[name] for name in rows.req_ids]
            iteration = SimpleNamespace(
                req_ids=rows.req_ids,
                query_start_loc_np=np.cumsum([0, *scheduled]),
                num_computed_tokens_np=rows.num_computed_tokens_cpu[:count].copy(),
            )
            self.pending = self.connector.prepare_output(iteration)
            self.sampled = ~self.runner.discard_request_mask.np[:count]
        return output

    def sample_tokens(self, *arguments: Any) -> Any:
        output = self.sample(*arguments)
        if self.pending is not None:
            self.pending.enqueue_cpu_copy(self.sampled.astype(int), np.zeros(len(self.sampled), dtype=int))
            output.aux_output_connector_output = self.pending.process_output()
        return output


# -- adapters ----------------------------------------------------------------------------------------------------------


class AdapterFromMemory(LoRAModel):
    """An adapter made of the tensors that came from the trainers instead of a file's."""

    tensors: ClassVar[dict[str, torch.Tensor]] = {}

    @classmethod
    def from_local_checkpoint(
        cls,
        lora_dir: str,
        expected_lora_modules: set[str],
        *,
        moe_ep_spec: object = None,
        tensorizer_config_dict: object = None,  # vLLM 0.26 passes it
        **options: Any,
    ) -> LoRAModel:
        return cls.from_lora_tensors(tensors=cls.tensors, **options)


def adapter_request(sync_id: int, path: str = MISSING_PATH) -> LoRARequest:
    return LoRARequest(f"adapter-{sync_id}", sync_id, path)


def unwrap_adapted_layers(model: torch.nn.Module) -> list[AdaptedLayer]:
    """Replace every layer with LoRA by its base layer; return the layers, with which `wrap_adapted_layers` undoes it.

    The base's weights are then loaded under the names of a model without LoRA; vLLM 0.26 wants other names.
    """
    layers = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, BaseLayerWithLoRA)
    ]
    for parent, name, layer in layers:
        setattr(parent, name, layer.base_layer)
    return layers


def wrap_adapted_layers(layers: list[AdaptedLayer]) -> None:
    for parent, name, layer in layers:
        setattr(parent, name, layer)
    layers.clear()


def replace_adapter(manager: WorkerLoRAManager, tensors: dict[str, torch.Tensor], sync_id: int, settings: dict) -> None:
    """Replace the present adapter. RuntimeError if the engine has no layer for a part of it.

    `settings` are the contents of peft's adapter_config.json, which vLLM reads from a directory only.
    """
    if not tensors:
        raise RuntimeError(f"the adapter of weight sync {sync_id} has not arrived")
    manager.remove_all_adapters()
    manager._lora_model_cls, AdapterFromMemory.tensors = AdapterFromMemory, tensors
    with TemporaryDirectory() as directory:
        with open(f"{directory}/{ADAPTER_CONFIG}", "w", encoding="utf-8") as file:
            json.dump(settings, file)
        manager.add_adapter(adapter_request(sync_id, directory))
    AdapterFromMemory.tensors = {}
    adapters = manager._adapter_manager
    unplaced = sorted(set(adapters.get_adapter(sync_id).loras) - set(adapters.modules))
    if unplaced:
        raise RuntimeError(
            f"the engine has no LoRA in {len(unplaced)} layers that the trainer adapts ({', '.join(unplaced[:3])}); "
            "set actor_rollout_ref.model.lora.merge=true, which syncs merged weights"
        )


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, BucketTransfer)
import_libraries(json.loads(os.environ.get(LIBRARIES, "[]")))
write_stacks_on_request()

"""A LoRA adapter in vLLM, handed over in memory. Knows vLLM's LoRA, as rollout/vllm.py knows the rest of it.

Every hand-over has a number of its own, which is the adapter's id in the engine and part of every request: an engine
that has not loaded the adapter of that number fails, where one that were asked by a fixed id would answer with the
adapter it has.
"""

import json
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager

from hybridrl.config.lora_checks import ENGINE_RANKS
from hybridrl.config.model_directory import ADAPTER_CONFIG
from hybridrl.config.schema import ModelConfig

Place = tuple[torch.nn.Module, str, BaseLayerWithLoRA]  # a layer with LoRA: what it is a part of, under which name

NOWHERE = "/an/adapter/comes/from/memory"  # where an engine that lacks it would look


def adapter_arguments(model: ModelConfig) -> dict[str, Any]:
    """vLLM's arguments for one adapter at a time."""
    rank = next(rank for rank in ENGINE_RANKS if rank >= model.lora_rank)
    return {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1, "max_cpu_loras": 1}


def adapter_request(number: int, path: str = NOWHERE) -> LoRARequest:
    return LoRARequest(f"adapter-{number}", number, path)


# -- in the engine's own process ---------------------------------------------------------------------------------------


class HandedOver(LoRAModel):
    """An adapter made of the tensors that came from the trainers, in place of a file's."""

    tensors: ClassVar[dict[str, torch.Tensor]] = {}

    @classmethod
    def from_local_checkpoint(
        cls,
        lora_dir: str,
        expected_lora_modules: set[str],
        *,
        moe_ep_spec: object = None,
        tensorizer_config_dict: object = None,  # of vLLM 0.26
        **options: Any,
    ) -> LoRAModel:
        return cls.from_lora_tensors(tensors=cls.tensors, **options)


def put_base_layers(model: torch.nn.Module) -> list[Place]:
    """Put the base of every layer with LoRA in the layer's place, and return the places for `put_back`.

    The base's weights are then loaded under the names of a model without LoRA, which vLLM 0.26 wants changed.
    """
    places = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, BaseLayerWithLoRA)
    ]
    for parent, name, layer in places:
        setattr(parent, name, layer.base_layer)
    return places


def put_back(places: list[Place]) -> None:
    for parent, name, layer in places:
        setattr(parent, name, layer)
    places.clear()


def load_adapter(manager: WorkerLoRAManager, tensors: dict[str, torch.Tensor], number: int, settings: dict) -> None:
    """Put an adapter in the place of the present one. RuntimeError where a part of it has no place in the engine.

    `settings` are those of peft's adapter_config.json, which vLLM reads from a directory alone.
    """
    if not tensors:
        raise RuntimeError(f"the adapter of hand-over {number} has not arrived")
    manager.remove_all_adapters()
    manager._lora_model_cls, HandedOver.tensors = HandedOver, tensors
    with TemporaryDirectory() as directory:
        with open(f"{directory}/{ADAPTER_CONFIG}", "w", encoding="utf-8") as file:
            json.dump(settings, file)
        manager.add_adapter(adapter_request(number, directory))
    HandedOver.tensors = {}
    adapters = manager._adapter_manager
    homeless = sorted(set(adapters.get_adapter(number).loras) - set(adapters.modules))
    if homeless:
        raise RuntimeError(
            f"the engine has no LoRA in {len(homeless)} layers that the trainer adapts ({', '.join(homeless[:3])}); "
            "set actor_rollout_ref.model.lora.merge=true, which hands over merged weights"
        )

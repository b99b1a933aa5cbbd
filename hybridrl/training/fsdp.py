"""Sharding a model over the training ranks with FSDP2, and taking it apart again."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from transformers import PreTrainedModel

from hybridrl import device as devices
from hybridrl.checkpoint.published import Part, own_tensors
from hybridrl.config.schema import FSDPConfig
from hybridrl.training.adapted import without_pairs
from hybridrl.training.loading import fill, layer_classes
from hybridrl.training.model import LanguageModel
from hybridrl.training.recompute import compile_layers
from hybridrl.training.shards import host_places, local, whole
from hybridrl.training.value_model import ValueModel, new_head


@cache
def mesh(device: str, ranks: int, shards: int) -> DeviceMesh:
    """All ranks in one row of shards, or in several rows that replicate one another."""
    if shards == ranks:
        return init_device_mesh(device, (ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(device, (ranks // shards, shards), mesh_dim_names=("replicate", "shard"))


Model = TypeVar("Model", LanguageModel, ValueModel)


def shard(model: Model, config: FSDPConfig, grid: DeviceMesh, *, offloaded: bool = False) -> Model:
    """Shard in place, layer by layer and then the rest; `offloaded` expects shards and gradients in host memory."""
    dtype = getattr(torch, config.dtype or "float32")
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if dtype == torch.float32 and config.model_dtype == "float32":
        policy = MixedPrecisionPolicy()
    # Pinned by FSDP2, each tensor would take up to twice its size; `shard_and_fill` pins them in one allocation.
    offload = CPUOffloadPolicy(pin_memory=False) if offloaded else OffloadPolicy()
    names = layer_classes(model.model, config.wrap_policy.transformer_layer_cls_to_wrap)
    layers = [module for module in model.modules() if type(module).__name__ in names]
    options = {"mesh": grid, "mp_policy": policy, "offload_policy": offload}
    if config.compile_layers:
        compile_layers(layers)
    for layer in layers:
        fully_shard(layer, reshard_after_forward=config.reshard_after_forward, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    register_fsdp_forward_method(model, "hidden_states")  # gathers its parameters as forward() does
    if isinstance(model, LanguageModel):
        register_fsdp_forward_method(model, "own_log_probs")
    if config.forward_prefetch:
        for layer, following in pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])
    return model


def shard_and_fill(
    blank: Model, path: str, config: FSDPConfig, grid: DeviceMesh, device: torch.device, *, offloaded: bool = False
) -> Model:
    """Shard a model without weights, and read those that this rank keeps to a device; collective. With `offloaded` they
    are then moved to host memory, and only the buffers stay."""
    sharded = shard(blank, config, grid, offloaded=offloaded)
    with without_pairs(sharded.model):
        fill(sharded.model, path, device, new_head(sharded) if isinstance(sharded, ValueModel) else None)
    sharded.to(device)  # moves buffers alone, and FSDP2 notes where its parameters are
    if offloaded:
        move_parameters(sharded, host_parameters(sharded))
        devices.release_cached_memory(device.type)
    return sharded


def reshard(model: nn.Module) -> None:
    """Give up every gathered parameter: a forward without a backward leaves some, the root's always."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def host_parameters(model: nn.Module) -> dict[nn.Parameter, Tensor]:
    """A place in host memory for each parameter's shard, in one allocation (`host_places`)."""
    parameters = list(model.parameters())
    return dict(zip(parameters, host_places(parameters, parameters[0].device.type), strict=True))


@torch.no_grad()
def move_parameters(model: nn.Module, places: Mapping[nn.Parameter, Tensor]) -> None:
    """Have a sharded model's parameters in these places from now on; buffers stay where they are."""

    def move(tensor: Tensor) -> Tensor:
        place = places.get(tensor)
        if place is None or local(place).data_ptr() == local(tensor).data_ptr():  # a tied parameter comes twice
            return tensor
        local(place).copy_(local(tensor), non_blocking=True)
        return place

    model._apply(move)  # of FSDP2, which notes where its parameters are


@torch.no_grad()
def whole_tensors(
    model: PreTrainedModel, parts: Iterable[Part], made: Mapping[str, Callable[[], Tensor]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that these parts are published as, unsharded, part by part; collective: each rank must walk through
    all of them. Those of the model's own that are `made` take the place of what it has under their names."""
    own, made = own_tensors(model), made or {}
    for part in parts:
        dtype = next(iter(part.published.values())).dtype
        found = {n: made[n]().to(dtype) if n in made else whole(own[n].detach(), dtype) for n in part.names}
        yield from part.publish(model, found).items()

"""Sharding a model over the training ranks with FSDP2, and working with its sharded tensors (DTensors)."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from hybridrl.checkpoint.export import Part, own_tensors
from hybridrl.config.schema import FSDPConfig
from hybridrl.core import device as devices
from hybridrl.core.training.layout import Layout, cut, shard_experts
from hybridrl.core.training.loading import fill, layer_classes
from hybridrl.core.training.model import LanguageModel, TokenModel, ValueModel, new_head, without_pairs
from hybridrl.core.training.working_copies import WorkingCopies

Model = TypeVar("Model", bound=LanguageModel | ValueModel)


def shard(model: Model, config: FSDPConfig, meshes: Layout, *, offloaded: bool = False) -> Model:
    """Shard a model in place, layer by layer, then the rest; `offloaded` expects shards and gradients on the host. A
    model on a single rank stays whole, with `WorkingCopies`, unless it is offloaded."""
    dtype = getattr(torch, config.dtype or "float32")
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if dtype == torch.float32 and config.model_dtype == "float32":
        policy = fsdp2.MixedPrecisionPolicy()
    # FSDP2's pinning would take up to twice a tensor's size; `shard_and_fill` pins all tensors in one allocation.
    offload = fsdp2.CPUOffloadPolicy(pin_memory=False) if offloaded else fsdp2.OffloadPolicy()
    names = layer_classes(model.model, config.wrap_policy.transformer_layer_cls_to_wrap)
    layers = [module for module in model.modules() if type(module).__name__ in names]
    options = {"mesh": meshes.dense, "mp_policy": policy, "offload_policy": offload}
    if config.compile_layers:
        compile_layers(layers)
    if isinstance(model, LanguageModel) and meshes.dense.device_type == "cpu":
        add_rows_to_the_heads_gradient(model)
    if dist.get_world_size() == 1 and not offloaded:
        model.copies = WorkingCopies(model, dtype)
        return model
    for experts in cut(model.model, meshes):
        shard_experts(experts, meshes, {"reshard_after_forward": config.reshard_after_forward, **options})
    for layer in layers:
        fsdp2.fully_shard(layer, reshard_after_forward=config.reshard_after_forward, **options)
    fsdp2.fully_shard(model, reshard_after_forward=False, **options)
    fsdp2.register_fsdp_forward_method(model, "hidden_states")  # gathers its parameters as forward() does
    if isinstance(model, LanguageModel):
        fsdp2.register_fsdp_forward_method(model, "own_log_probs")
    if config.forward_prefetch:
        for layer, following in pairwise(layers):
            assert isinstance(layer, fsdp2.FSDPModule) and isinstance(following, fsdp2.FSDPModule)
            layer.set_modules_to_forward_prefetch([following])
    return model


def add_rows_to_the_heads_gradient(model: LanguageModel) -> None:
    """Make the gradient of an embedding tied to the head sparse: autograd adds the rows of its tokens to the head's. A
    full matrix of mostly zeros would be written and read per micro-batch. Not for CUDA, which adds in any order."""
    embedding, head = model.model.get_input_embeddings(), model.model.get_output_embeddings()
    if isinstance(embedding, nn.Embedding) and embedding.weight is head.weight:
        embedding.sparse = True


def compile_layers(layers: list[nn.Module], backend: Any = "inductor") -> None:
    """Compile the forward pass of each layer for rows of any lengths, as one graph where attention has a kernel."""
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)


def shard_and_fill(
    blank: Model, path: str, config: FSDPConfig, meshes: Layout, device: torch.device, *, offloaded: bool = False
) -> Model:
    """Shard a model without weights and read this rank's part of the weights to the device; collective. With
    `offloaded` the parameters then move to host memory, and only the buffers stay on the device."""
    sharded = shard(blank, config, meshes, offloaded=offloaded)
    with without_pairs(sharded.model):
        fill(sharded.model, path, device, new_head(sharded) if isinstance(sharded, ValueModel) else None)
    sharded.to(device)  # moves only buffers; FSDP2 records the location of its parameters
    if offloaded:
        move_parameters(sharded, host_parameters(sharded))
        devices.release_cached_memory(device.type)
    return sharded


def reshard(model: nn.Module) -> None:
    """Free every gathered parameter: a forward pass without a backward pass leaves some, always the root's. A model
    that is not sharded gets its parameters back, with their gradients."""
    if isinstance(model, TokenModel) and model.copies is not None:
        return model.copies.release()
    for module in model.modules():
        if isinstance(module, fsdp2.FSDPModule):
            module.reshard()


def host_parameters(model: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Allocate host memory for each parameter's shard, in one allocation (`host_copies`)."""
    parameters = list(model.parameters())
    return dict(zip(parameters, host_copies(parameters, parameters[0].device.type), strict=True))


@torch.no_grad()
def move_parameters(model: nn.Module, targets: Mapping[Any, Tensor]) -> None:
    """Move a sharded model's parameters to these tensors; buffers stay where they are."""

    def move(tensor: Tensor) -> Tensor:
        target = targets.get(tensor)
        if target is None or local(target).data_ptr() == local(tensor).data_ptr():  # a tied parameter comes twice
            return tensor
        local(target).copy_(local(tensor), non_blocking=True)
        return target

    model._apply(move)  # FSDP2 overrides this, and records the location of its parameters


@torch.no_grad()
def full_tensors(
    model: PreTrainedModel, parts: Iterable[Part], computed: Mapping[str, Callable[[], Tensor]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the published tensors of these parts, unsharded, part by part; collective: each rank must iterate over all
    of them. Tensors of `computed` replace the model's own tensors of the same names."""
    present, computed = own_tensors(model), computed or {}
    for part in parts:
        dtype = next(iter(part.published.values())).dtype
        tensors = {
            name: computed[name]().to(dtype) if name in computed else full_tensor(present[name].detach(), dtype)
            for name in part.names
        }
        yield from part.publish(model, tensors).items()


def full_tensor(value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor unsharded, in this type; collective. Shards in host memory are gathered on the device."""
    value = value if dtype is None else value.to(dtype)
    if not isinstance(value, DTensor):
        return value
    on_device = value.to(value.device_mesh.device_type)
    assert isinstance(on_device, DTensor)
    return on_device.full_tensor()


@torch.no_grad()
def clip_gradient(model: nn.Module, limit: float) -> Tensor:
    """Scale the gradients to a norm of at most `limit`; return the norm before, which is not read; collective. It works
    on shards, as DTensor's operations keep the host busy for several times as long."""
    shards: dict[int, list[Tensor]] = defaultdict(list)  # by the number of ranks that have the same
    for gradient in (parameter.grad for parameter in model.parameters() if parameter.grad is not None):
        shards[dist.get_world_size() // _cuts(gradient)].append(local(gradient))
    norms = {ranks: torch.stack(torch._foreach_norm(same, 2, torch.float32)) for ranks, same in shards.items()}
    squares = torch.cat([each.square() / ranks for ranks, each in norms.items()])
    dist.all_reduce(squares)
    norm = torch.linalg.vector_norm(squares.sqrt())  # in torch's order, so that runs stay the same
    torch._foreach_mul_([shard for same in shards.values() for shard in same], (limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _cuts(tensor: Tensor) -> int:
    """Return the number of shards of a tensor."""
    if not isinstance(tensor, DTensor):
        return 1
    placed = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in placed if not placement.is_replicate())


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_shard(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of an unsharded tensor, sharded and located like the other tensor."""
    if not isinstance(like, DTensor):
        return tensor
    part = distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return part.to_local().to(like.device)


def host_copies(tensors: Sequence[Tensor], device: str) -> list[Tensor]:
    """Return a tensor in host memory for each tensor, of the same shape, type and sharding; uninitialised, all in one
    allocation (`device.host_buffer`)."""
    shards = [local(tensor) for tensor in tensors]
    copies = devices.carve(devices.host_buffer(devices.room(shards), device), shards)
    # DTensor.from_local would move a tensor that is not on the mesh's device.
    return [
        DTensor(copy, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else copy
        for tensor, copy in zip(tensors, copies, strict=True)
    ]

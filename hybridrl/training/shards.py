"""Tensors that may be sharded over the ranks (DTensors): whole, this rank's part, and a place for it in host memory."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from hybridrl import device as devices

ALIGNMENT = 64  # bytes, as torch's own allocator has it on a CPU


def whole(value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor's values unsharded, in this type; collective. Shards in host memory are gathered on the device."""
    value = value if dtype is None else value.to(dtype)
    return value.to(value.device_mesh.device_type).full_tensor() if isinstance(value, DTensor) else value


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_shard(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank has whole, where the other tensor's part is."""
    if not isinstance(like, DTensor):
        return tensor
    part = distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return part.to_local().to(like.device)


def host_places(tensors: Sequence[Tensor], device: str) -> list[Tensor]:
    """For each tensor another of its shape, type and sharding in host memory, uninitialised; all of them lie in one
    allocation (`device.host_buffer`)."""
    locals_ = [local(tensor) for tensor in tensors]
    sizes = [-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in locals_]
    ends = list(accumulate(sizes, initial=0))
    buffer = devices.host_buffer(ends[-1], device)
    pieces = zip(locals_, ends, strict=False)
    places = [buffer[begin : begin + part.nbytes].view(part.dtype).view(part.shape) for part, begin in pieces]
    return [_sharded_like(tensor, place) for tensor, place in zip(tensors, places, strict=True)]


def _sharded_like(tensor: Tensor, place: Tensor) -> Tensor:
    # DTensor.from_local would move what lies on another device than the mesh.
    return DTensor(place, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else place

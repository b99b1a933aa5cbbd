"""Which tensor lies where in which bucket: worked out once, from names, shapes and types alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

ALIGNMENT = 64


@dataclass(frozen=True)
class Tensor:
    """A tensor's place in its bucket; plain data, so that it passes any serialiser. `offset` and `bytes` in bytes."""

    name: str
    shape: list[int]
    dtype: str
    offset: int
    bytes: int

    def view(self, bucket: torch.Tensor) -> torch.Tensor:
        """This tensor's values inside a uint8 bucket."""
        flat = bucket[self.offset : self.offset + self.bytes].view(getattr(torch, self.dtype))
        return flat.view(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Tensors that are sent together, in the trainer's buffer from `start` on: of two that follow each other one can be
    filled while the engines read the other."""

    tensors: list[Tensor]
    bytes: int
    start: int = 0

    def room(self, buffer: torch.Tensor) -> torch.Tensor:
        """This bucket's part of the buffer."""
        return buffer[self.start : self.start + self.bytes]


@dataclass(frozen=True)
class HandOver:
    """What goes to an engine: the model (once, where it is but the base of an adapter), then the adapter, if there is
    one that goes by itself."""

    model: list[Bucket]
    adapter: list[Bucket]


def plan_buckets(parameters: Sequence[tuple[str, torch.Size, torch.dtype]], limit: int) -> list[Bucket]:
    """Cut a model's parameters into buckets, two of which take at most `limit` bytes, whole layers in one bucket.

    An engine fuses tensors of one layer (q, k, v into one matrix) and reads them when the last has come; a bucket is
    written over by the next but one, so a layer may not straddle two: a layer above the limit gets a bucket of its own.
    What belongs to no layer (embedding, last norm, head) comes last and together whatever its size, as an engine that
    pads the vocabulary reads it only at the end.
    """
    limit //= 2
    layers: dict[str, list[tuple[str, torch.Size, torch.dtype]]] = {}
    for item in parameters:
        layers.setdefault(_layer(item[0]), []).append(item)
    rest = layers.pop("", [])
    groups: list[list[tuple[str, torch.Size, torch.dtype]]] = []
    size = limit + 1
    for layer in layers.values():
        more = sum(_aligned(_bytes(shape, dtype)) for _, shape, dtype in layer)
        if size + more > limit:
            groups.append([])
            size = 0
        groups[-1].extend(layer)
        size += more
    buckets = [_place(group) for group in [*groups, rest] if group]
    second = max((bucket.bytes for bucket in buckets[::2]), default=0)
    return [replace(bucket, start=number % 2 * second) for number, bucket in enumerate(buckets)]


def buffer_bytes(buckets: Sequence[Bucket]) -> int:
    """The size of a buffer in which all of these have their room."""
    return max((bucket.start + bucket.bytes for bucket in buckets), default=0)


def _layer(name: str) -> str:
    """The name up to its first number: one string a layer, empty for what lies outside the layers."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ""


def _bytes(shape: torch.Size, dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _aligned(size: int) -> int:
    return math.ceil(size / ALIGNMENT) * ALIGNMENT


def _place(group: list[tuple[str, torch.Size, torch.dtype]]) -> Bucket:
    tensors, offset = [], 0
    for name, shape, dtype in group:
        size = _bytes(shape, dtype)
        tensors.append(Tensor(name, list(shape), str(dtype).removeprefix("torch."), offset, size))
        offset += _aligned(size)
    return Bucket(tensors, offset)

"""Layout of a model's tensors in buckets, computed once from names, shapes and types."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

ALIGNMENT = 64


@dataclass(frozen=True)
class Tensor:
    """A tensor's place in its bucket, as plain data for any serialiser. `offset` and `bytes` are in bytes."""

    name: str
    shape: list[int]
    dtype: str
    offset: int
    bytes: int

    def view(self, bucket: torch.Tensor) -> torch.Tensor:
        """Return this tensor's values inside a uint8 bucket."""
        flat = bucket[self.offset : self.offset + self.bytes].view(getattr(torch, self.dtype))
        return flat.view(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Tensors that are sent together, at `start` in the trainer's buffer: of two successive buckets one can be filled
    while the engines read the other."""

    tensors: list[Tensor]
    bytes: int
    start: int = 0

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return this bucket's part of the buffer."""
        return buffer[self.start : self.start + self.bytes]


@dataclass(frozen=True)
class SyncPlan:
    """Everything that a weight sync sends: the model (once, if it is only the base of an adapter), then the adapter, if
    one is sent separately."""

    model: list[Bucket]
    adapter: list[Bucket]


def plan_buckets(parameters: Sequence[tuple[str, torch.Size, torch.dtype]], limit: int) -> list[Bucket]:
    """Partition a model's parameters into buckets, two of which take at most `limit` bytes, without splitting layers.

    An engine fuses tensors of one layer (q, k, v into one matrix) and reads them when the last one has arrived; a
    bucket is overwritten by the second one after it, so a layer may not straddle two: a layer above the limit gets a
    separate bucket. Parameters outside the layers (embedding, last norm, head) come last and together whatever their
    size, as an engine that pads the vocabulary reads them only at the end.
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
    """Return the size of a buffer that holds any of these buckets at its place."""
    return max((bucket.start + bucket.bytes for bucket in buckets), default=0)


def _layer(name: str) -> str:
    """Return the name up to its first number: one string per layer, empty for parameters outside the layers."""
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

"""Layout of a model's tensors in buckets, computed once from names, shapes and types."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

ALIGNMENT = 64
LAYER = re.compile(r"(.*?\.)??\d+(?=\.|$)")  # the name of a layer: that of its tensors up to the first number


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
    layers: dict[str, list[Tensor]] = {}
    for name, shape, dtype in parameters:
        layer = LAYER.match(name)
        size = math.prod(shape) * dtype.itemsize
        tensor = Tensor(name, list(shape), str(dtype).removeprefix("torch."), 0, size)
        layers.setdefault(layer[0] if layer else "", []).append(tensor)
    rest = layers.pop("", [])
    groups: list[list[Tensor]] = []
    taken = limit + 1  # bytes of the last group: the first layer begins one
    for layer in layers.values():
        more = sum(map(_aligned, layer))
        if taken + more > limit // 2:
            groups.append([])
            taken = 0
        groups[-1].extend(layer)
        taken += more
    buckets = []
    for group in filter(None, [*groups, rest]):
        ends = list(accumulate(map(_aligned, group), initial=0))
        buckets.append(
            Bucket([replace(tensor, offset=end) for tensor, end in zip(group, ends, strict=False)], ends[-1])
        )
    second = max((bucket.bytes for bucket in buckets[::2]), default=0)
    return [replace(bucket, start=number % 2 * second) for number, bucket in enumerate(buckets)]


def buffer_bytes(buckets: Sequence[Bucket]) -> int:
    """Return the size of a buffer that holds any of these buckets at its place."""
    return max((bucket.start + bucket.bytes for bucket in buckets), default=0)


def _aligned(tensor: Tensor) -> int:
    return math.ceil(tensor.bytes / ALIGNMENT) * ALIGNMENT

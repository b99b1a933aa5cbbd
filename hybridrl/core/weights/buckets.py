"""Buckets of weights: the layout of a model's tensors in them, and the memory that one process fills and another on the
same device reads without a copy.

The memory's handle is a CUDA IPC handle, or on CPU the file descriptor of an anonymous file in memory. Both are plain
data that needs no pickle, and both vanish with their processes: nothing stays behind in /dev/shm.
"""

import math
import mmap
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from hybridrl.core import device as devices
from hybridrl.required import required

ALIGNMENT = 64
LAYER = re.compile(r"(.*?\.)??\d+(?=\.|$)")  # a layer's name: its tensors' names up to the first number
Handle = dict[str, Any]
# Names of the values that torch.multiprocessing would pickle for a storage, after its device.
CUDA_STORAGE = ("memory", "storage_bytes", "offset", "counter", "counter_offset", "event", "synchronise")


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

    def clear_gaps(self, buffer: torch.Tensor) -> None:
        """Zero the bytes between tensors: the digest covers them, and they still have another bucket's contents."""
        ends = [tensor.offset for tensor in self.tensors[1:]] + [self.bytes]
        for tensor, end in zip(self.tensors, ends, strict=True):
            self.view(buffer)[tensor.offset + tensor.bytes : end] = 0


@dataclass(frozen=True)
class SyncPlan:
    """Everything that a weight sync sends: the model (once, if it is only the base of an adapter), then the adapter, if
    one is sent separately."""

    model: list[Bucket]
    adapter: list[Bucket]


def plan_buckets(parameters: Sequence[tuple[str, torch.Size, torch.dtype]], limit: int) -> list[Bucket]:
    """Partition a model's parameters into buckets without splitting layers; two buckets take at most `limit` bytes.

    An engine fuses tensors of one layer (q, k, v into one matrix) and reads them when the last one has arrived. A
    bucket is overwritten by the second one after it, so a layer may not straddle two: a layer above half of
    `limit` gets a separate bucket. Parameters outside the layers (embedding, last norm, head) come last and together,
    whatever their size, as an engine that pads the vocabulary reads them only at the end.
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
        layer_bytes = sum(map(_aligned, layer))
        if taken + layer_bytes > limit // 2:
            groups.append([])
            taken = 0
        groups[-1].extend(layer)
        taken += layer_bytes
    buckets = []
    for group in [*groups, rest] if rest else groups:
        ends = list(accumulate(map(_aligned, group), initial=0))
        buckets.append(
            Bucket([replace(tensor, offset=end) for tensor, end in zip(group, ends, strict=False)], ends[-1])
        )
    second = max((bucket.bytes for bucket in buckets[::2]), default=0)
    return [replace(bucket, start=number % 2 * second) for number, bucket in enumerate(buckets)]


def buffer_bytes(buckets: Sequence[Bucket]) -> int:
    """Return the bytes of a buffer large enough for every bucket at its `start`."""
    return max((bucket.start + bucket.bytes for bucket in buckets), default=0)


def _aligned(tensor: Tensor) -> int:
    return math.ceil(tensor.bytes / ALIGNMENT) * ALIGNMENT


class SharedBuffer:
    """A uint8 buffer on this process's device that other processes can open by `handle`."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.descriptor: int | None = None
        if device.type == "cuda":
            self.tensor = torch.empty(size, dtype=torch.uint8, device=device)
        else:
            self.descriptor = os.memfd_create("hybridrl-weights", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, size)
            self.tensor = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)

    @cached_property
    def handle(self) -> Handle:
        """The key that opens the memory. On CUDA torch frees memory that has a handle only after a reader opened it."""
        size = len(self.tensor)
        if self.descriptor is not None:
            return {"pid": os.getpid(), "descriptor": self.descriptor, "size": size}
        _, *shared = self.tensor.untyped_storage()._share_cuda_()
        return dict(zip(CUDA_STORAGE, shared, strict=True)) | {"size": size}

    def close(self, *, reader_died: bool = False) -> None:
        """Free the memory. On CUDA torch keeps it until its reader has closed it, and a dead reader cannot."""
        if self.descriptor is not None:
            return os.close(self.descriptor)
        allocated = devices.allocated_bytes()
        del self.tensor
        if reader_died and devices.allocated_bytes() == allocated:  # not closed; a second close would keep it too
            release = torch.UntypedStorage._release_ipc_counter_cuda
            release(self.handle["counter"], self.handle["counter_offset"])


def open_buffer(handle: Handle, device: torch.device) -> torch.Tensor:
    """Return the sender's memory as a uint8 tensor of this process; RuntimeError if it cannot be opened."""
    try:
        if device.type == "cuda":
            shared = (handle[name] for name in CUDA_STORAGE)
            storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *shared)
            empty = torch.empty(0, dtype=torch.uint8, device=device)
            return empty.set_(storage, 0, (handle["size"],), (1,))
        descriptor = os.open(f"/proc/{handle['pid']}/fd/{handle['descriptor']}", os.O_RDWR)
        try:
            return torch.frombuffer(mmap.mmap(descriptor, handle["size"]), dtype=torch.uint8)
        finally:
            os.close(descriptor)
    except (OSError, ValueError, RuntimeError) as error:
        raise RuntimeError(
            f"the engine cannot open the trainer's memory ({error}): both must run on one machine and share its "
            "process and IPC namespaces; in a container add --ipc=host --pid=host, or start both in the same one"
        ) from error


def bucket_description(bucket: Bucket, handles: list[Handle | None], digests: list[int]) -> dict[str, Any]:
    """Return the description of a bucket for BucketReader, as plain data; a handle and a digest for each device."""
    tensors = [asdict(tensor) for tensor in bucket.tensors]
    return {"tensors": tensors, "start": bucket.start, "size": bucket.bytes, "handles": handles, "digests": digests}


class BucketReader:
    """Reads buckets in a process of an engine, next to the model: from the memory of trainers on the same device, or as
    the first training rank sends them from another device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.received = torch.empty(0, dtype=torch.uint8, device=device)
        self.opened: tuple[Handle, torch.Tensor] | None = None
        self.group: devices.BroadcastGroup | None = None  # with the training rank that sends weights

    def join(self, address: str, rank: int, size: int, seconds: float) -> None:
        """Form a group with the training rank that sends weights, and with all other engines."""
        self.group = None
        self.group = devices.BroadcastGroup(self.device.type, address, None, rank, size, seconds)

    def read(self, place: int, info: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors of a bucket for the engine's device number `place`: views of the trainer's memory,
        valid until the next bucket but one is filled, or of received memory, valid until the next bucket is received.
        RuntimeError if the bytes differ from those sent."""
        handle, start, size = info["handles"][place], info["start"], info["size"]
        buffer = self._receive(size) if handle is None else self._open(handle)[start : start + size]
        if digest(buffer) != info["digests"][place]:
            raise RuntimeError("the weights that arrived are not those that were sent: the bucket's digests differ")
        tensors = [Tensor(**item) for item in info["tensors"]]
        return [(tensor.name, tensor.view(buffer)) for tensor in tensors]

    def _open(self, handle: Handle) -> torch.Tensor:
        if self.opened is None or self.opened[0] != handle:
            self.opened = (handle, open_buffer(handle, self.device))
        return self.opened[1]

    def _receive(self, size: int) -> torch.Tensor:
        if len(self.received) < size:
            self.received = torch.empty(size, dtype=torch.uint8, device=self.device)
        required(self.group).broadcast(self.received[:size])
        return self.received[:size]

    def close(self) -> None:
        """Release the trainer's memory, and on CUDA that of received buckets; on CPU it is kept for the next sync."""
        self.opened = None
        if self.device.type != "cpu":
            self.received = self.received[:0].clone()


def digest(buffer: torch.Tensor) -> int:
    """Return a checksum of a uint8 buffer whose size is a multiple of 8: the sum of its 64-bit words, modulo 2**64."""
    return int(buffer.view(torch.int64).sum())

"""Tensors in files, read one at a time whatever the file format."""

import operator
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import ACCESS_COPY, ALLOCATIONGRANULARITY, mmap
from pathlib import Path
from zipfile import BadZipFile

import torch
from safetensors import SafetensorError
from torch import Tensor

from hybridrl.config import ConfigError

# Names of types in safetensors files.
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

# What readers raise for files that are missing or damaged.
UNREADABLE = (
    AssertionError,
    AttributeError,
    BadZipFile,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,  # for a damaged length
    OSError,
    OverflowError,
    RuntimeError,
    SafetensorError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)

# Bytes of a tensor read at once. Reading into reused memory takes half the CPU time of mapping the file, and the kernel
# reads further ahead.
READ_BYTES = 4 << 20

# A region of a tensor: its offset in each dimension, and its values.
Chunk = tuple[Sequence[int], Tensor]


class Unreadable(ConfigError):
    """A file of a saved model is missing or damaged."""


@dataclass(frozen=True)
class Tensors:
    """The tensors of a saved model. `meta` has names, shapes and types, as meta tensors; `chunks` reads a tensor as it
    is stored, each element once. `form` describes the file format; `faults` verifies its checksums, if it has any."""

    form: str
    meta: dict[str, Tensor]
    chunks: Callable[[str], Iterable[Chunk]]
    faults: Callable[[], list[str]] = list

    def read(self, name: str) -> Tensor:
        """Return a copy of a tensor. Raises Unreadable if a chunk is missing or damaged."""
        tensor = torch.empty_like(self.meta[name], device="cpu")
        for offsets, chunk in self._checked_chunks(name):
            region = tensor
            for dim, (offset, size) in enumerate(zip(offsets, chunk.shape, strict=True)):
                region = region.narrow(dim, offset, size)
            region.copy_(chunk)
        return tensor

    def pieces(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yield a tensor in runs of consecutive elements, each with the index of its first one: its chunks if it is cut
        by rows, else all of it. Raises Unreadable if a chunk is missing or damaged."""
        meta = self.meta[name]
        for offsets, chunk in self._checked_chunks(name):
            if chunk.shape[1:] != meta.shape[1:]:
                yield 0, self.read(name)
                return
            yield sum(map(operator.mul, offsets, meta.stride())), chunk

    def _checked_chunks(self, name: str) -> Iterator[Chunk]:
        meta, elements = self.meta[name], 0
        for offsets, chunk in self.chunks(name):
            ends = list(map(operator.add, offsets, chunk.shape))
            if chunk.dim() != meta.dim() or any(map(operator.gt, ends, meta.shape)):
                region = f"chunk {list(chunk.shape)} at {list(offsets)}"
                raise Unreadable(f"{name} cannot be read: {region} exceeds its shape {list(meta.shape)}")
            elements += chunk.numel()
            yield offsets, chunk
        if elements != meta.numel():
            raise Unreadable(f"{name} cannot be read: {elements} of its {meta.numel()} elements were saved")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its storage starts at byte `begin`, and the tensor at element `first` of the storage."""

    file: Path
    begin: int
    bytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    first: int

    def mapped(self) -> Tensor:
        """Map the tensor into memory. Copy it before computing: its address may not be aligned to its element size."""
        if not self.bytes:
            return torch.empty(self.shape, dtype=self.dtype)
        memory, begin = map_bytes(self.file, self.begin, self.bytes, ACCESS_COPY)
        content = torch.frombuffer(memory, dtype=torch.uint8, offset=begin).view(self.dtype)
        return content.as_strided(self.shape, self.stride, self.first)

    def elements(self, first: int, count: int) -> Tensor:
        """Read consecutive elements of a contiguous tensor. Raises ValueError if the file is too short."""
        values = torch.empty(count, dtype=self.dtype)
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.begin + (self.first + first) * self.dtype.itemsize)
            read = file.readinto(memoryview(values.view(torch.uint8).numpy()))
        if read != values.nbytes:
            raise ValueError(f"it ends {values.nbytes - read} bytes too early")
        return values

    def chunks(self, offsets: Sequence[int]) -> Iterator[Chunk]:
        """Yield copies of a few rows at a time, as regions of a larger tensor that has this one at `offsets`."""
        if self.stride != torch.empty(self.shape, device="meta").stride():
            yield offsets, self.mapped().clone()
            return
        if not self.shape:
            yield offsets, self.elements(0, 1).view(self.shape)
            return
        row = self.shape[1:].numel()
        rows = max(READ_BYTES // max(row * self.dtype.itemsize, 1), 1)
        for first in range(0, max(self.shape[0], 1), rows):
            count = min(rows, self.shape[0] - first)
            values = self.elements(first * row, count * row).view(count, *self.shape[1:])
            yield [offsets[0] + first, *offsets[1:]], values


class MappedFile(mmap):
    def seekable(self) -> bool:  # required by zipfile; mmap has it since Python 3.13
        return True


def map_bytes(file: Path, begin: int, size: int, access: int) -> tuple[MappedFile, int]:
    """Map a range of a file; return the mapping and the range's offset in it."""
    prefix = begin % ALLOCATIONGRANULARITY
    with file.open("rb") as opened:
        return MappedFile(opened.fileno(), prefix + size, offset=begin - prefix, access=access), prefix


def blank(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a meta tensor."""
    return torch.empty(shape, dtype=dtype, device="meta")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any failure to read a file or directory into an Unreadable that names it and the reason."""
    try:
        yield
    except ConfigError:
        raise
    except UNREADABLE as error:
        reason = str(error).split("\n")[0] or type(error).__name__
        raise Unreadable(f"{path} cannot be read: {reason}") from error

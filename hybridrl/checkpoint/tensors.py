"""Tensors in files of several formats, read one at a time, and without executing code that a file names.

A pickle of torch.save names functions and classes to call. Only plain containers are built here. Tensors become
StoredTensor, which refer to their bytes in the file; everything else becomes an inert `Record`.
"""

import operator
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from mmap import ACCESS_COPY, ACCESS_READ, ALLOCATIONGRANULARITY, mmap
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from safetensors import SafetensorError
from torch import Tensor

from hybridrl.config import ConfigError
from hybridrl.config.files import LFS_FIX, is_lfs_pointer

# Names of types in safetensors files.
TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip
# Exceptions of readers for missing and damaged files; MemoryError for a damaged length.
UNREADABLE = (
    AssertionError, AttributeError, BadZipFile, EOFError, ImportError, LookupError, MemoryError, OSError, OverflowError,
    RuntimeError, SafetensorError, TypeError, ValueError, pickle.UnpicklingError,
)  # fmt: skip
# Bytes of a tensor read at once. Reading into reused memory takes half the CPU time of mapping the file, and the kernel
# reads further ahead.
READ_BYTES = 4 << 20

# A region of a tensor: its offset in each dimension, and its values.
Chunk = tuple[Sequence[int], Tensor]


class Unreadable(ConfigError):
    """A file of a saved model is missing or damaged."""


@dataclass(frozen=True)
class Tensors:
    """The tensors of a saved model. `meta`: names, shapes and types, as meta tensors; `chunks` reads a tensor in stored
    pieces, each element once. `form` describes the file format; `faults` verifies the checksums, if there are any."""

    form: str
    meta: dict[str, Tensor]
    chunks: Callable[[str], Iterable[Chunk]]
    faults: Callable[[], list[str]] = list

    def read(self, name: str) -> Tensor:
        """Return a copy of a tensor. Raises Unreadable if a chunk is missing or damaged."""
        tensor = torch.empty_like(self.meta[name], device="cpu")
        self.fill(tensor, name, [0] * tensor.dim())
        return tensor

    def fill(self, target: Tensor, name: str, first: Sequence[int]) -> None:
        """Fill a tensor with a region of a saved one: it starts at `first` in each dimension."""
        for offsets, chunk in self._checked_chunks(name):
            region, values = target, chunk
            for dim, (begin, offset) in enumerate(zip(first, offsets, strict=True)):
                low, high = max(begin, offset), min(begin + target.shape[dim], offset + chunk.shape[dim])
                if low >= high:
                    break
                region = region.narrow(dim, low - begin, high - low)
                values = values.narrow(dim, low - offset, high - low)
            else:
                region.copy_(values)

    def pieces(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yield a tensor in runs of consecutive elements, each with the index of its first element: the chunks of a
        tensor cut by rows, else the whole tensor. Raises Unreadable if a chunk is missing or damaged."""
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
        memory, begin = _map(self.file, self.begin, self.bytes, ACCESS_COPY)
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
        """Yield copies of a few rows at a time, as regions of a larger tensor with this one at `offsets`."""
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


class _MappedFile(mmap):
    def seekable(self) -> bool:  # required by zipfile; mmap has it since Python 3.13
        return True


def _map(file: Path, begin: int, size: int, access: int) -> tuple[_MappedFile, int]:
    """Map a range of a file; return the mapping and the range's offset in it."""
    prefix = begin % ALLOCATIONGRANULARITY
    with file.open("rb") as opened:
        return _MappedFile(opened.fileno(), prefix + size, offset=begin - prefix, access=access), prefix


def blank(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a meta tensor."""
    return torch.empty(shape, dtype=dtype, device="meta")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any failure to read a file or directory into Unreadable, with its path and the reason."""
    try:
        yield
    except ConfigError:
        raise
    except UNREADABLE as error:
        reason = str(error).split("\n")[0] or type(error).__name__
        if is_lfs_pointer(path):
            reason = f"it is a Git LFS pointer, not the file that it stands for; {LFS_FIX}"
        raise Unreadable(f"{path} cannot be read: {reason}") from error


class Record:
    """Stands in for an object of a class that is not built; holds the arguments of its constructor."""

    arguments: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *arguments: Any) -> "Record":
        record = super().__new__(cls)
        record.arguments = arguments
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def fields(self) -> dict[str, Any]:
        """The object's attributes. Those of a class with slots come as a pair of dictionaries, either may be None."""
        parts = self.state if isinstance(self.state, tuple) else (self.state,)
        return {key: value for part in parts if isinstance(part, dict) for key, value in part.items()}


def load(file: Path, begin: int = 0, size: int | None = None) -> Any:
    """Return the object in a file of torch.save, or in a range of one. Raises Unreadable."""
    with reading(file):
        memory, prefix = _map(file, begin, file.stat().st_size - begin if size is None else size, ACCESS_READ)
        with memory, ZipFile(memory) as archive:
            return _Unpickler(archive, memory, file, begin - prefix).load()


def damaged(file: Path) -> bool:
    """Return whether the content of a file that `load` can read differs from its checksums."""
    with reading(file), ZipFile(file) as archive:
        return archive.testzip() is not None


class _Unpickler(pickle.Unpickler):
    """Unpickles an archive. `memory` maps the file from byte `begin`."""

    def __init__(self, archive: ZipFile, memory: mmap, file: Path, begin: int) -> None:
        names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if not names:
            raise ValueError("torch.save did not write it")
        super().__init__(BytesIO(archive.read(names[0])))  # verifies the checksum
        self.archive, self.memory, self.file, self.begin = archive, memory, file, begin
        self.prefix = names[0].removesuffix("data.pkl")

    def find_class(self, module: str, name: str) -> Any:
        built = _SAFE.get(f"{module}.{name}")
        return type(name, (Record,), {}) if built is None else built

    def persistent_load(self, saved: Any) -> StoredTensor:
        _, dtype, key, _, elements = saved
        entry, size = self.archive.getinfo(f"{self.prefix}data/{key}"), elements * dtype.itemsize
        if (entry.compress_type, entry.file_size) != (ZIP_STORED, size):
            raise ValueError(f"storage {key} does not have {size} bytes")
        # The entry's local header may be longer than the archive's directory states.
        lengths = struct.unpack_from("<HH", self.memory, entry.header_offset + 26)
        begin = self.begin + entry.header_offset + 30 + sum(lengths)
        return StoredTensor(self.file, begin, size, dtype, torch.Size([elements]), (1,), 0)


def _tensor(storage: StoredTensor, first: int, shape: Any, stride: Any, *_: Any) -> StoredTensor:
    return replace(storage, shape=torch.Size(shape), stride=tuple(stride), first=first)


def _tensor_of_bytes(storage: StoredTensor, first: int, shape: Any, stride: Any, *further: Any) -> StoredTensor:
    """Newer types have byte storages; the type follows after requires_grad and hooks."""
    return replace(_tensor(storage, first, shape, stride), dtype=further[2])


def _tensor_subclass(function: Any, kind: Any, arguments: tuple[Any, ...], state: Any) -> Any:
    """Return a record for a subclass that wraps other tensors, such as DTensor; otherwise the tensor itself."""
    if not isinstance(function, type):
        return function(*arguments)
    record = kind(*arguments)
    record.__setstate__(state)
    return record


def _nested_class(owner: Any, name: str) -> type[Record]:
    """Pickles look up nested classes by getattr."""
    return type(name, (Record,), {})


_STORAGES = {
    f"{name.capitalize()}Storage": name for name in ("double", "float", "half", "long", "int", "short", "bool")
}
_STORAGES |= {"BFloat16Storage": "bfloat16", "CharStorage": "int8", "ByteStorage": "uint8"}
_SAFE = {
    "collections.OrderedDict": OrderedDict,
    "torch.Size": torch.Size,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_bytes,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._tensor._rebuild_from_type_v2": _tensor_subclass,
    "torch.storage.UntypedStorage": torch.uint8,
    "__builtin__.getattr": _nested_class,
    "builtins.getattr": _nested_class,
    **{f"torch.{storage}": getattr(torch, dtype) for storage, dtype in _STORAGES.items()},
    **{str(dtype): dtype for dtype in TYPES},
}

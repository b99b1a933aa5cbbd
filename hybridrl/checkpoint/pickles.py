"""What torch.save wrote, read without running any code that it names, and without copying its tensors.

A pickle says by name with which functions and classes it is to be built. Here plain containers are built, a tensor is
told by a `Stored`, and all else becomes an inert `Record` of what was to go into it: nothing a file names is called.
"""

import pickle
import struct
from collections import OrderedDict
from dataclasses import dataclass, replace
from io import BytesIO
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import torch

from hybridrl.checkpoint.stored import Stored, map_bytes
from hybridrl.checkpoint.tensors import TYPES, reading


class Record:
    """An object of a class that is not built: what the class would have been given."""

    state: Any = None

    def __new__(cls, *arguments: Any) -> "Record":
        record = super().__new__(cls)
        record.arguments = arguments
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def fields(self) -> dict[str, Any]:
        """Its attributes. With slots they come as a pair of dictionaries, of which the first may be missing."""
        parts = self.state if isinstance(self.state, tuple) else (self.state,)
        return {key: value for part in parts if isinstance(part, dict) for key, value in part.items()}


def load(file: Path, begin: int = 0, size: int | None = None) -> Any:
    """What torch.save was given when it wrote a file, or these bytes of one. Raises Unreadable."""
    with reading(file):
        memory, prefix = map_bytes(file, begin, file.stat().st_size - begin if size is None else size, ACCESS_READ)
        with memory, ZipFile(memory) as archive:
            return _Unpickler(archive, memory, file, begin - prefix).load()


def is_damaged(file: Path) -> bool:
    """Whether the checksums in a file that `load` can read are not those of its content."""
    with reading(file), ZipFile(file) as archive:
        return archive.testzip() is not None


@dataclass(frozen=True)
class _Storage:
    file: Path
    begin: int
    bytes: int
    dtype: torch.dtype


class _Unpickler(pickle.Unpickler):
    """`begin` is the byte of the file at which what is mapped begins."""

    def __init__(self, archive: ZipFile, memory: mmap, file: Path, begin: int) -> None:
        names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if not names:
            raise ValueError("torch.save did not write it")
        super().__init__(BytesIO(archive.read(names[0])))  # the checksum is compared
        self.archive, self.memory, self.file, self.begin = archive, memory, file, begin
        self.top = names[0].removesuffix("data.pkl")

    def find_class(self, module: str, name: str) -> Any:
        known = _BUILT.get(f"{module}.{name}")
        return type(name, (Record,), {}) if known is None else known

    def persistent_load(self, saved: Any) -> _Storage:
        _, dtype, key, _, elements = saved
        entry, size = self.archive.getinfo(f"{self.top}data/{key}"), elements * dtype.itemsize
        if (entry.compress_type, entry.file_size) != (ZIP_STORED, size):
            raise ValueError(f"the storage {key} is not of {size} bytes")
        # The entry's own header, in front of its bytes, may be longer than the archive's directory has it.
        lengths = struct.unpack_from("<HH", self.memory, entry.header_offset + 26)
        return _Storage(self.file, self.begin + entry.header_offset + 30 + sum(lengths), size, dtype)


def _tensor(storage: _Storage, first: int, shape: Any, stride: Any, *_: Any) -> Stored:
    return Stored(storage.file, storage.begin, storage.bytes, storage.dtype, torch.Size(shape), tuple(stride), first)


def _tensor_of_bytes(storage: _Storage, first: int, shape: Any, stride: Any, *more: Any) -> Stored:
    """Of the newer types there are no storages: theirs are of bytes, and the type follows gradient and hooks."""
    return replace(_tensor(storage, first, shape, stride), dtype=more[2])


def _parameter(data: Stored, *_: Any) -> Stored:
    return data


def _of_a_class(function: Any, kind: Any, arguments: tuple[Any, ...], state: Any) -> Any:
    """A tensor of a class of its own: a record where it wraps others, as a DTensor does, and else what it holds."""
    if not isinstance(function, type):
        return function(*arguments)
    record = kind(*arguments)
    record.__setstate__(state)
    return record


def _inner_class(owner: Any, name: str) -> type[Record]:
    """A class within another is found by getattr."""
    return type(name, (Record,), {})


_STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
}
_BUILT = {
    "collections.OrderedDict": OrderedDict,
    "torch.Size": torch.Size,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_bytes,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._tensor._rebuild_from_type_v2": _of_a_class,
    "torch.storage.UntypedStorage": torch.uint8,
    "__builtin__.getattr": _inner_class,
    "builtins.getattr": _inner_class,
    **{f"torch.{name}Storage": dtype for name, dtype in _STORAGES.items()},
    **{str(dtype): dtype for dtype in TYPES},
}

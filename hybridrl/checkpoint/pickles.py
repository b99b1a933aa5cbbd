"""Read files of torch.save without executing code that they name and without copying their tensors.

A pickle names the functions and classes it is built with. Only plain containers are built here. Tensors become
StoredTensor, which refer to their bytes in the file; everything else becomes an inert `Record` of its arguments.
"""

import pickle
import struct
from collections import OrderedDict
from dataclasses import replace
from io import BytesIO
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import torch

from hybridrl.checkpoint.tensors import TYPES, StoredTensor, map_bytes, reading


class Record:
    """Stands in for an object of a class that is not built; holds what its constructor would have received."""

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
        memory, prefix = map_bytes(file, begin, file.stat().st_size - begin if size is None else size, ACCESS_READ)
        with memory, ZipFile(memory) as archive:
            return _Unpickler(archive, memory, file, begin - prefix).load()


def is_damaged(file: Path) -> bool:
    """Return whether the content of a file that `load` can read differs from its checksums."""
    with reading(file), ZipFile(file) as archive:
        return archive.testzip() is not None


class _Unpickler(pickle.Unpickler):
    """Unpickles an archive of which `memory` is a mapping that starts at byte `begin` of the file."""

    def __init__(self, archive: ZipFile, memory: mmap, file: Path, begin: int) -> None:
        names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if not names:
            raise ValueError("torch.save did not write it")
        super().__init__(BytesIO(archive.read(names[0])))  # verifies the checksum
        self.archive, self.memory, self.file, self.begin = archive, memory, file, begin
        self.prefix = names[0].removesuffix("data.pkl")

    def find_class(self, module: str, name: str) -> Any:
        known = _SAFE.get(f"{module}.{name}")
        return type(name, (Record,), {}) if known is None else known

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


def _tensor_of_bytes(storage: StoredTensor, first: int, shape: Any, stride: Any, *more: Any) -> StoredTensor:
    """Newer types have byte storages; the type follows after requires_grad and hooks."""
    return replace(_tensor(storage, first, shape, stride), dtype=more[2])


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

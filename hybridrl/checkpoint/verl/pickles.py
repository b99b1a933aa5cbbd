"""Files that torch.save wrote, read without running any code that they name.

A pickle says by name with which functions and classes it is to be built. Here tensors and dictionaries are built, and
all else becomes an inert record of what was to go into it: nothing a file names is ever called. Tensors are mapped, not
copied: their bytes come into memory when they are used.
"""

import pickle
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import torch

from hybridrl.checkpoint.tensors import TYPES, Unreadable, reading
from hybridrl.config import ConfigError


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


def load(file: Path) -> Any:
    """What torch.save was given, with a `Record` for each object that is neither a tensor nor a plain container."""
    if not file.is_file():
        raise Unreadable(f"{file} is missing")
    with reading(file):
        with ZipFile(file) as archive:  # checks what torch does not: that the file is whole, and the pickle unchanged
            names = archive.namelist()
            for name in names:
                if name.endswith("/data.pkl"):
                    archive.read(name)
        if any(name.endswith("/constants.pkl") for name in names):
            raise ConfigError(f"{file} is a program (TorchScript), not saved tensors")
        return torch.load(file, map_location="cpu", mmap=True, weights_only=False, pickle_module=_INERT)


def is_damaged(file: Path) -> bool:
    """Whether the checksums in a file that `load` can read are not those of its content."""
    with reading(file), ZipFile(file) as archive:
        return archive.testzip() is not None


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _BUILT.get(f"{module}.{name}")
        return type(name, (Record,), {}) if known is None else known


def _rebuild_subclass(function: Any, kind: Any, arguments: tuple[Any, ...], state: Any) -> Any:
    """A tensor of a class of its own, such as DTensor: a record of it; a parameter is the tensor it wraps."""
    if not issubclass(kind, Record):
        return function(*arguments)
    record = kind(*arguments)
    record.__setstate__(state)
    return record


def _inner_class(owner: Any, name: str) -> type[Record]:
    """A class inside another is found by getattr."""
    return type(name, (Record,), {})


_BUILT = {
    "collections.OrderedDict": OrderedDict,
    "torch.Size": torch.Size,
    "torch.storage.UntypedStorage": torch.UntypedStorage,
    "torch.nn.parameter.Parameter": torch.nn.Parameter,
    "torch._utils._rebuild_tensor_v2": torch._utils._rebuild_tensor_v2,
    "torch._utils._rebuild_tensor_v3": torch._utils._rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": torch._utils._rebuild_parameter,
    "torch._tensor._rebuild_from_type_v2": _rebuild_subclass,
    "__builtin__.getattr": _inner_class,
    "builtins.getattr": _inner_class,
    **{str(dtype): dtype for dtype in TYPES},
}
_INERT = SimpleNamespace(__name__="inert", Unpickler=_Unpickler)

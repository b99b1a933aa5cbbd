"""The standard library in memory: a confined process opens no file, and imports its modules from here.

Loaded into the process that runs a model's program: imports the standard library only.
"""

import contextlib
import ctypes
import functools
import json
import marshal
import mmap
import os
import sys
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    BuiltinImporter,
    ExtensionFileLoader,
    FrozenImporter,
    ModuleSpec,
    SourceFileLoader,
)
from types import ModuleType

_DIRECTORY = os.path.dirname(os.__file__)
_LENGTH = 8  # bytes of the number in front of the index
_EXTENSIONS = os.path.join(_DIRECTORY, "lib-dynload")
_OMITTED_EXTENSIONS = ("_test", "_ctypes_test", "xx", "_xx", "_tkinter", "_curses", "_dbm", "_gdbm", "nis", "readline")
_OMITTED = {
    *("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip", "distutils", "venv"),
    *("tkinter", "turtledemo", "turtle.py", "pydoc_data", "sitecustomize.py", "usercustomize.py", "__pycache__"),
}


@functools.cache
def pack() -> int:
    """Return the descriptor of a file in memory with the code of every module, compiled once per calling process."""
    modules: dict[str, tuple[str, bool, int, int]] = {}
    codes: list[bytes] = []
    end = 0
    for directory, directories, files in os.walk(_DIRECTORY):
        directories[:] = sorted(name for name in directories if name not in _OMITTED and name.isidentifier())
        package = os.path.relpath(directory, _DIRECTORY).replace(os.sep, ".").lstrip(".")
        for file in sorted(file for file in files if file.endswith(".py") and file not in _OMITTED):
            is_package, path = file == "__init__.py", os.path.join(directory, file)
            name = package if is_package else f"{package}.{file[:-3]}".lstrip(".")
            codes.append(marshal.dumps(SourceFileLoader(name, path).get_code(name)))
            modules[name] = (path, is_package, end, end + len(codes[-1]))
            end += len(codes[-1])
    index = json.dumps(modules).encode()
    descriptor = os.memfd_create("library")
    with open(descriptor, "wb", closefd=False) as packed:
        packed.writelines([len(index).to_bytes(_LENGTH), index, *codes])
    return descriptor


class Library:
    """Finds and loads the modules in a descriptor from `pack`, and extension modules, which it maps in advance."""

    def __init__(self, descriptor: int) -> None:
        self._data = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        self._start = _LENGTH + int.from_bytes(self._data[:_LENGTH])
        self._modules = json.loads(self._data[_LENGTH : self._start])
        suffix = EXTENSION_SUFFIXES[0]
        files = os.listdir(_EXTENSIONS) if os.path.isdir(_EXTENSIONS) else []
        names = [name for name in files if name.endswith(suffix) and not name.startswith(_OMITTED_EXTENSIONS)]
        self._extensions = {name.removesuffix(suffix): os.path.join(_EXTENSIONS, name) for name in names}
        for path in self._extensions.values():
            with contextlib.suppress(OSError):  # a dependency of it is not installed: its import fails, as elsewhere
                ctypes.CDLL(path)

    def install(self) -> None:
        """Import only from here from now on."""
        sys.meta_path[:] = [BuiltinImporter, FrozenImporter, self]

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name in self._extensions:
            path = self._extensions[name]
            return ModuleSpec(name, ExtensionFileLoader(name, path), origin=path)
        if name not in self._modules:
            return None
        origin, is_package, _, _ = self._modules[name]
        spec = ModuleSpec(name, self, origin=origin, is_package=is_package)
        spec.has_location = True
        if is_package:
            spec.submodule_search_locations.append(os.path.dirname(origin))
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """Use the default."""

    def exec_module(self, module: ModuleType) -> None:
        _, _, begin, end = self._modules[module.__name__]
        exec(marshal.loads(self._data[self._start + begin : self._start + end]), vars(module))

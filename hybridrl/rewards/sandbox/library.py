"""The standard library in memory: a confined process opens no file, and imports from here.

Loaded into the process that runs a model's program: imports the standard library alone.
"""

import contextlib
import ctypes
import json
import marshal
import mmap
import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES, BuiltinImporter, ExtensionFileLoader, FrozenImporter, ModuleSpec
from types import ModuleType

DIRECTORY = os.path.dirname(os.__file__)
LENGTH = 8  # bytes of the number in front of the index
_EXTENSIONS = os.path.join(DIRECTORY, "lib-dynload")
_LEFT_OUT = ("_test", "_ctypes_test", "xx", "_xx", "_tkinter", "_curses", "_dbm", "_gdbm", "nis", "readline")


class Library:
    """Finds and loads the modules of a descriptor from `pack`, and extension modules, which it maps beforehand."""

    def __init__(self, descriptor: int) -> None:
        self._data = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        self._start = LENGTH + int.from_bytes(self._data[:LENGTH])
        self._places = json.loads(self._data[LENGTH : self._start])
        suffix = EXTENSION_SUFFIXES[0]
        files = os.listdir(_EXTENSIONS) if os.path.isdir(_EXTENSIONS) else []
        names = [name for name in files if name.endswith(suffix) and not name.startswith(_LEFT_OUT)]
        self._extensions = {name.removesuffix(suffix): os.path.join(_EXTENSIONS, name) for name in names}
        for path in self._extensions.values():
            with contextlib.suppress(OSError):  # what it depends on is not installed: its import fails, as elsewhere
                ctypes.CDLL(path)

    def install(self) -> None:
        """Import from here alone from now on."""
        sys.meta_path[:] = [BuiltinImporter, FrozenImporter, self]

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name in self._extensions:
            place = self._extensions[name]
            return ModuleSpec(name, ExtensionFileLoader(name, place), origin=place)
        if name not in self._places:
            return None
        place, is_package, _, _ = self._places[name]
        spec = ModuleSpec(name, self, origin=place, is_package=is_package)
        spec.has_location = True
        if is_package:
            spec.submodule_search_locations.append(os.path.dirname(place))
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """The default."""

    def exec_module(self, module: ModuleType) -> None:
        _, _, begin, end = self._places[module.__name__]
        exec(marshal.loads(self._data[self._start + begin : self._start + end]), vars(module))

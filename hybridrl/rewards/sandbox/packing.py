"""Packs the standard library for `library.py`: the caller's side."""

import functools
import json
import marshal
import os
from importlib.machinery import SourceFileLoader
from pathlib import Path

from hybridrl.rewards.sandbox.library import DIRECTORY, LENGTH

_LEFT_OUT = {
    *("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip", "distutils", "venv"),
    *("tkinter", "turtledemo", "turtle.py", "pydoc_data", "sitecustomize.py", "usercustomize.py"),
}


@functools.cache
def pack() -> int:
    """A descriptor of a file in memory with the code of every module. Compiled once per process."""
    places: dict[str, tuple[str, bool, int, int]] = {}
    codes: list[bytes] = []
    end = 0
    for path in sorted(Path(DIRECTORY).rglob("*.py")):
        parts = path.relative_to(DIRECTORY).parts
        is_package = parts[-1] == "__init__.py"
        name = ".".join(parts[:-1] if is_package else (*parts[:-1], path.stem))
        if _LEFT_OUT.isdisjoint(parts) and all(part.isidentifier() for part in parts[:-1]):
            codes.append(marshal.dumps(SourceFileLoader(name, str(path)).get_code(name)))
            places[name] = (str(path), is_package, end, end + len(codes[-1]))
            end += len(codes[-1])
    index = json.dumps(places).encode()
    descriptor = os.memfd_create("library")
    with open(descriptor, "wb", closefd=False) as file:
        file.writelines([len(index).to_bytes(LENGTH), index, *codes])
    return descriptor

"""A user's own function, named path/to/file.py:function in a key."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from hybridrl.config.error import ConfigError


def load_function(name: str, key: str) -> Callable[..., Any]:
    """Import the file and return the function; ConfigError names the key and what is missing."""
    path, _, function = name.rpartition(":")
    file = Path(path).expanduser().absolute()
    if not file.is_file():
        raise ConfigError(f"{key}={name}: there is no file {file}; expected path/to/file.py:function")
    members = vars(_import(file))
    if not callable(members.get(function)):
        raise ConfigError(f"{key}={name}: {file.name} has no function {function}")
    return members[function]


def _import(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"own_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module

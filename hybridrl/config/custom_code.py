"""A user's own Python, named in a key: path/to/file.py:function, or a module that a room looks into itself."""

import importlib
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

from hybridrl.config.error import ConfigError

OWN_KEYS = "HYBRIDRL_OWN"
# A file that does so may fail in verl's own imports, where a copy of verl lies in the working directory.
IMPORTS_VERL = re.compile(r"^\s*(from|import)\s+verl\b", re.MULTILINE)


def publish_own_keys(own: dict[str, Any]) -> None:
    """Let code of the user's own find the keys under `own` as JSON in the environment, here and in the processes that
    are started from here."""
    os.environ[OWN_KEYS] = json.dumps(own)


def load_function(name: str, key: str) -> Callable[..., Any]:
    """Import the file and return the function; ConfigError names the key and what is missing."""
    path, _, function = name.rpartition(":")
    members = vars(load_module(path, key))
    if not callable(members.get(function)):
        own = [other for other, member in members.items() if callable(member) and other[0] != "_"]
        raise ConfigError(
            f"{key}={name}: {Path(path).name} has no function {function}; it has {', '.join(own) or 'none'}"
        )
    return members[function]


def load_module(path: str, key: str) -> ModuleType:
    """The module at a plain path, `file://path` or `pkg://dotted.name`; ConfigError shows the user's own line."""
    file = _file(path)
    in_package = path.startswith("pkg://")
    if not in_package and not file.is_file():
        raise ConfigError(f"{key}={path}: there is no such file; give the path of a .py file")
    try:
        return importlib.import_module(path.removeprefix("pkg://")) if in_package else _run_file(file)
    except (Exception, SystemExit) as error:  # whatever the user's own lines raise
        raise ConfigError(f"{key}={path} does not import: {where(error, path)}") from error


def load_class(path: str, name: str, key: str) -> type:
    """The class of this name in a file or module; ConfigError names the key and what is missing."""
    try:
        members = vars(load_module(path, key))
    except ConfigError as error:
        if isinstance(error.__cause__, ImportError) and IMPORTS_VERL.search(_text(path)):
            raise ConfigError(
                f"{error}; verl is not installed here: let {name} stand by itself (docs/data.md)"
            ) from error
        raise
    if not isinstance(members.get(name), type):
        own = [
            other for other, member in members.items() if isinstance(member, type) and member.__module__[:4] == "own_"
        ]
        raise ConfigError(f"{key}={path}: there is no class {name}; there is {', '.join(own) or 'none'}")
    return members[name]


def import_libraries(names: list[str], key: str = "actor_rollout_ref.model.external_lib") -> None:
    """Import modules for what they do when imported, such as registering a model; ConfigError names the key."""
    for name in names:
        load_module(name if name.endswith(".py") or "://" in name else f"pkg://{name}", key)


def _file(path: str) -> Path:
    return Path(path.removeprefix("file://")).expanduser().absolute()


def _text(path: str) -> str:
    return _file(path).read_text(encoding="utf-8") if _file(path).is_file() else ""


def _run_file(file: Path) -> ModuleType:
    loader = SourceFileLoader(f"own_{file.stem}", str(file))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    sys.modules[module.__name__] = module  # dataclasses and typing look a class's module up there
    sys.path.append(str(file.parent))  # as for a script: what lies beside it can be imported
    loader.exec_module(module)
    return module


def where(error: BaseException, path: str) -> str:
    """The error and its deepest place in the user's file: `NameError: name 'x' is not defined (r.py:3)`."""
    file = _file(path)
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if frame.filename == str(file)] or frames
    lines = [f" ({frame.filename}:{frame.lineno})" for frame in frames if not _ours(frame)]
    return f"{type(error).__name__}: {error}{lines[-1] if lines else ''}"


def _ours(frame: traceback.FrameSummary) -> bool:
    return frame.filename == __file__ or "importlib" in frame.filename

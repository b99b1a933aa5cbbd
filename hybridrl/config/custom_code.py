"""Custom Python code named by a key: path/to/file.py:function, a class in a file, or a module.

Custom code gets copies of values, and a process that it forks does not return into hybridrl.
"""

import copy
import functools
import importlib
import inspect
import json
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from hybridrl import project_file
from hybridrl.config.findings import ConfigError

T = TypeVar("T")
P = ParamSpec("P")
OWN_KEYS = "HYBRIDRL_OWN"
IMMUTABLE = (str, int, float, bool, type(None), bytes)
PREFIX = "own_"  # prefix of the names of modules loaded from files
MADE = r"import \*|globals|setattr|exec|__getattr__"  # a file with one of these may define names not in its text
# Such a file may fail in verl's own imports, if a copy of verl is in the working directory.
IMPORTS_VERL = re.compile(r"^\s*(from|import)\s+verl\b", re.MULTILINE)


def publish_own_keys(own: dict[str, Any]) -> None:
    """Put the keys under `own` into the environment as JSON, for custom code in this process and those it starts."""
    os.environ[OWN_KEYS] = json.dumps(own)


def load_function(name: str, key: str) -> Callable[..., Any]:
    """Import the file and return the function; ConfigError names the key and the missing item."""
    path, _, function = name.rpartition(":")
    members = vars(load_module(path, key))
    if not callable(members.get(function)):
        names = [other for other, member in members.items() if callable(member) and other[0] != "_"]
        cause = f"{key}={name}: {Path(path).name} has no function {function}"
        raise ConfigError(cause, fix=f"it has {', '.join(names) or 'none'}", keys=key)
    return members[function]


def bind_named(function: Callable[..., Any], values: Mapping[str, Any]) -> Callable[..., Any]:
    """The function with the values bound to its parameters of the same names."""
    names = [name for name in inspect.signature(function).parameters if name in values]
    return functools.partial(function, **{name: values[name] for name in names})


def taken(function: Callable[..., Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the named arguments that a function or class accepts."""
    parameters = inspect.signature(function).parameters
    accepts_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in named.items() if accepts_all or name in parameters}


def call_custom(
    key: str, name: str, function: Callable[..., Any], *arguments: Any, trial: str = "on made-up groups", page: str
) -> Any:
    """Return the result of a custom function in a trial. ConfigError names the failing line, or reports that the
    function has other parameters."""
    fix = f"{page} shows what it is called with"
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ConfigError(f"{key}={name} has other parameters: {error}", fix=fix, keys=key) from error
    with calling(f"{key}={name}", name.rpartition(":")[0], f"fails {trial}", fix=fix, keys=key):
        return function(*arguments)


def load_module(path: str, key: str) -> ModuleType:
    """The module at a plain path, `file://path` or `pkg://dotted.name`; ConfigError shows the failing line."""
    file = script_path(path)
    if not path.startswith("pkg://") and not file.is_file():
        raise ConfigError(f"{key}={path}: there is no such file", fix="give the path of a .py file", keys=key)
    try:
        if path.startswith("pkg://"):
            return importlib.import_module(path.removeprefix("pkg://"))
        loader = SourceFileLoader(f"{PREFIX}{file.stem}", str(file))
        module = module_from_spec(spec_from_loader(loader.name, loader))
        sys.modules[module.__name__] = module  # dataclasses and typing look a class's module up there
        sys.path.append(str(file.parent))  # as for a script: the files next to it can be imported
        with EndingForks():
            loader.exec_module(module)
        return module
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise ConfigError(f"{key}={path} does not import: {where(error, path)}") from error


def check_source(path: str, function: str, key: str) -> None:
    """Raise ConfigError if an existing file is not Python, or never names the function; nothing in it runs."""
    file = script_path(path)
    source = file.read_bytes() if file.is_file() else None
    try:
        compile(source or "", str(file), "exec")
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{key}={path} does not import: {where(error, path)}", keys=key) from error
    if source is not None and not re.search(rf"\b{re.escape(function)}\b|{MADE}".encode(), source):
        raise ConfigError(f"{key}={path}: there is no function {function} in it", keys=key)


def load_class(path: str, name: str, key: str) -> type:
    """The class of this name in a file or module; ConfigError names the key and the missing item."""
    try:
        members = vars(load_module(path, key))
    except ConfigError as error:
        text = file.read_text(encoding="utf-8") if (file := script_path(path)).is_file() else ""
        if isinstance(error.__cause__, ImportError) and IMPORTS_VERL.search(text):
            fix = f"verl is not installed here: write {name} without it ({project_file('docs/data.md')})"
            raise ConfigError(str(error), fix=fix, keys=key) from error
        raise
    if not isinstance(members.get(name), type):
        classes = (member for member in members.values() if isinstance(member, type))
        names = [cls.__name__ for cls in classes if cls.__module__.startswith(PREFIX)]
        fix = f"it has {', '.join(names) or 'none'}"
        raise ConfigError(f"{key}={path}: there is no class {name}", fix=fix, keys=key)
    return members[name]


def import_libraries(names: list[str], key: str = "actor_rollout_ref.model.external_lib") -> None:
    """Import modules for their side effects, such as registering a model (possible only once per process). ConfigError
    names the key."""
    for name in names:
        _import_once(name if name.endswith(".py") or "://" in name else f"pkg://{name}", key)


def once(function: Callable[P, T]) -> Callable[P, T]:
    """Call a function once per set of arguments. functools.cache does not: threads that call it at the same time each
    get another value, such as another event loop."""
    cached, lock = functools.cache(function), threading.RLock()

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> T:
        with lock:
            return cached(*arguments, **named)

    return call


@once
def _import_once(path: str, key: str) -> None:
    load_module(path, key)


def script_path(path: str) -> Path:
    """The file of custom code, from its path in the configuration."""
    return Path(path.removeprefix("file://")).expanduser().absolute()


def where(error: BaseException, path: str) -> str:
    """The error and its deepest line in the user's file: `NameError: name 'x' is not defined (r.py:3)`."""
    file = script_path(path)
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if frame.filename == str(file)] or frames
    ours = [frame for frame in frames if frame.filename == __file__ or "importlib" in frame.filename]
    lines = [f" ({frame.filename}:{frame.lineno})" for frame in frames if frame not in ours]
    return f"{type(error).__name__}: {text_of(error)}{lines[-1] if lines else ''}"


def text_of(error: BaseException) -> str:
    """The text of an error of any class, also of one without text."""
    text = attempt(lambda: str(error))
    return text if isinstance(text, str) else "(it has no text)"


@contextmanager
def calling(call: str, path: str, fails: str = "fails", **details: str) -> Iterator[None]:
    """Turn any exception of a user's file into ConfigError with the failing line."""
    try:
        yield
    except Exception as error:
        raise ConfigError(f"{call} {fails}: {where(error, path)}", **details) from error


def construct(cls: type, arguments: dict[str, Any], key: str, path: str) -> Any:
    """Create an instance with those of the arguments that the class accepts; ConfigError names the failing line."""
    with calling(f"{key}={path}: {cls.__name__}({', '.join(arguments)})", path):
        return cls(**taken(cls, arguments))


def attempt(call: Callable[[], T]) -> T | Exception:
    """Return the result or the exception of foreign code: a user's object, or a library with many exception types."""
    try:
        return call()
    except Exception as error:
        return error


class EndingForks:
    """A block that ends forked processes. If code within the block forks and the child leaves the block, the child
    exits like a script: only the process that entered continues, for example to send a score."""

    def __enter__(self) -> None:
        self._process = os.getpid()

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        # GeneratorExit does not end it: a child of multiprocessing may collect the generators of its parent.
        if os.getpid() == self._process or isinstance(error, GeneratorExit):
            return
        code = error.code if isinstance(error, SystemExit) else error and 1
        try:
            if not isinstance(error, SystemExit | None):
                traceback.print_exception(error)
            elif isinstance(code, str):
                print(code, file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code & 0xFF if isinstance(code, int) else code is not None)


def own(value: Any) -> Any:
    """Return a copy of a value, since custom code may change it; immutable values and callables are not copied."""
    kind = type(value)
    if kind is dict:
        return {key: own(item) for key, item in value.items()}
    if kind is list:
        return [own(item) for item in value]
    if kind is functools.partial:
        return functools.partial(value.func, *own(list(value.args)), **own(value.keywords))
    return value if kind in IMMUTABLE or callable(value) else copy.deepcopy(value)

"""Source of a function as a file: with the functions, classes and constants of its module that it uses, and imports.

Custom code is named by a file (custom_code.py), since it runs in other processes. A function of a script or a notebook
has no file that can be imported: importing the script would start it again.
"""

import ast
import builtins
import copy
import inspect
import linecache
import os
import re
import symtable
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from hybridrl.config.findings import ConfigError

INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
TO_A_FILE = "or write it into a file and name path.py:function"


def function_file(function: Callable[..., Any], file: Path, argument: str) -> tuple[str, str]:
    """Return the path and name by which a key names a function: its module's file, or `file`, which is written. Raises
    ConfigError, with the caller's `argument`, for a function whose source or surroundings cannot be written."""
    inner, module = inspect.unwrap(function), str(getattr(function, "__module__", ""))
    name = getattr(inner, "__name__", type(function).__name__)
    if inspect.ismethod(function) or not inspect.isfunction(inner):
        kind = "a bound method" if inspect.ismethod(function) else f"of type {type(function).__name__}"
        raise ConfigError(f"{argument}={name} is {kind}", fix=f"define a function with def that calls it, {TO_A_FILE}")
    own_file = _member(module, "__file__") if module != "__main__" and _member(module, name) is function else None
    if own_file and not _member(module, "__package__"):
        return str(own_file), name
    source = FunctionSource(f"{argument}={name}", inner)
    if own_file:  # a file of a package may have relative imports
        source.add_import(f"from {module} import {name}", module)
    else:
        source.add(name, function)
    write_if_changed(file, source.text())
    return str(file), name


def write_if_changed(file: Path, text: str) -> None:
    """Write a file, by a rename, unless it has this content. Raises ConfigError for text that is not Unicode."""
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{file.name}: {error}", fix="remove unpaired surrogates") from error
    if not file.is_file() or file.read_bytes() != data:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.writing")
        temporary.write_bytes(data)
        temporary.replace(file)


class FunctionSource:
    """The parts of the file, in the order in which they are needed; `setting` begins error messages."""

    def __init__(self, setting: str, function: Callable[..., Any]) -> None:
        self.setting, self.module, self.names = setting, function.__module__, function.__globals__
        self.imports, self.directories = dict[str, None](), dict[str, None]()
        self.definitions, self._added = dict[str, str](), set[str]()

    def text(self) -> str:
        paths = [f"sys.path.append({place!r})" for place in self.directories]
        imports = [*(["import sys", *paths] if paths else []), *self.imports]
        parts = [f'"""Written by hybridrl.train for {self.setting}."""', "from __future__ import annotations"]
        return "\n\n".join([*parts, "\n".join(imports), *self.definitions.values()]) + "\n"

    def add(self, name: str, value: Any) -> None:
        """Add the value of a global name, after all that its definition uses. Raises ConfigError."""
        if name in self._added:
            return
        self._added.add(name)
        inner = inspect.unwrap(value) if callable(value) else value
        module, own_name = getattr(inner, "__module__", None), getattr(value, "__name__", name)
        if isinstance(value, ModuleType):
            self.add_import(f"import {value.__name__}{'' if value.__name__ == name else f' as {name}'}", value.__name__)
        elif isinstance(value, re.Pattern):
            self.imports["import re"] = None
            self.definitions[name] = f"{name} = re.compile({value.pattern!r}, {value.flags})"
        elif module == self.module and (inspect.isfunction(inner) or inspect.isclass(inner)):
            self._add_definition(inner)
            if inner.__name__ != name:
                self.definitions[name] = f"{name} = {inner.__name__}"
        elif is_literal(value):
            self.definitions[name] = f"{name} = {value!r}"
        elif source := next((member for member in (own_name, name) if _member(module, member) is value), None):
            self.add_import(f"from {module} import {source}{'' if source == name else f' as {name}'}", str(module))
        else:
            raise self._error(f"the variable {name} of type {type(value).__name__}", "create it within the function")

    def add_import(self, statement: str, module: str) -> None:
        """Add an import, and the directory of its module unless it is installed."""
        self.imports[statement] = None
        top = sys.modules.get(module.partition(".")[0])
        packages = list(getattr(top, "__path__", ()))
        place = os.path.dirname(os.path.abspath(packages[0] if packages else getattr(top, "__file__", None) or os.sep))
        if place != os.sep and not place.startswith(INSTALLED):
            self.directories[place] = None

    def _add_definition(self, value: Any) -> None:
        name = value.__name__
        if name == "<lambda>":
            raise self._error("a lambda, whose source is only a part of a line", "define it with def")
        if free := getattr(getattr(value, "__code__", None), "co_freevars", ()):
            raise self._error(f"{', '.join(free)} of the function around it", "pass it as a global constant")
        try:
            statement = ast.parse(text := self._source(value)).body[0]
        except (OSError, TypeError, SyntaxError) as error:
            cause = f"{name}, whose source cannot be read ({error})"
            raise self._error(cause, "define it in a script or a cell of a notebook") from error
        if not isinstance(statement, DEFINITIONS) or statement.name != name:
            raise self._error(f"{name}, whose source has changed since it was defined", "run it again")
        self._add_submodules(statement)
        needed, annotated = used_names(unannotated(statement)), used_names(statement)
        for used in sorted(needed):
            if used in self.names:
                self.add(used, self.names[used])
            elif not hasattr(builtins, used):
                raise self._error(f"the name {used}, which is not defined", "define it first")
        for used in sorted((annotated - needed) & self.names.keys() - self._added):
            try:  # annotations are not evaluated
                self.add(used, self.names[used])
            except ConfigError:
                self._added.discard(used)
        self.definitions[name] = f"\n{text.rstrip()}"

    def _add_submodules(self, statement: ast.stmt) -> None:
        """Import the modules that are used as attributes, such as xml.etree: `import xml` alone does not give them."""
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and (name := ast.unparse(node)) in sys.modules:
                first = name.partition(".")[0]
                if self.names.get(first) is sys.modules[first]:
                    self.add_import(f"import {name}", name)

    def _source(self, value: Any) -> str:
        """Return the text of a definition. `inspect` finds no classes of a notebook: they are sought in its cells."""
        with suppress(OSError, TypeError):
            return textwrap.dedent(inspect.getsource(value))
        if not inspect.isclass(value):
            raise OSError("there is no file of it")
        methods = (getattr(inspect.unwrap(member), "__code__", None) for member in vars(value).values())
        cells = [file for file in linecache.cache if not os.path.exists(file)]
        files = {code.co_filename for code in methods if code}.intersection(cells)
        texts = {
            text for file in files or cells for text in class_texts("".join(linecache.getlines(file)), value.__name__)
        }
        if len(texts) != 1:
            raise OSError(f"{len(texts)} different classes of this name are in cells")
        return texts.pop()

    def _error(self, cause: str, fix: str) -> ConfigError:
        return ConfigError(f"{self.setting} uses {cause}", fix=f"{fix}, {TO_A_FILE}")


def _member(module: str | None, name: str) -> Any:
    return getattr(sys.modules.get(str(module)), name, None)


def is_literal(value: Any) -> bool:
    """Whether the text of a value is Python for an equal value of the same type."""
    try:
        written = ast.literal_eval(repr(value))
        return type(written) is type(value) and bool(written == value)
    except (ValueError, SyntaxError, RecursionError):
        return False


def class_texts(source: str, name: str) -> Iterator[str]:
    """Yield the definitions of a class in a cell."""
    with suppress(SyntaxError):
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                yield "\n".join(source.splitlines()[first - 1 : node.end_lineno])


def unannotated(statement: ast.stmt) -> ast.stmt:
    """Return a definition without the types of parameters and results."""
    statement = copy.deepcopy(statement)
    for node in ast.walk(statement):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
    return statement


def used_names(statement: ast.stmt) -> set[str]:
    """Return the names that a definition reads from its module or from Python, without those such as __file__."""
    tables, names = [symtable.symtable(ast.unparse(statement), "definition", "exec")], set[str]()
    for table in tables:
        tables += table.get_children()
        symbols = (symbol for symbol in table.get_symbols() if symbol.is_global())
        names |= {symbol.get_name() for symbol in symbols if symbol.is_referenced() or symbol.is_declared_global()}
    return {name for name in names if not name.startswith("__")}

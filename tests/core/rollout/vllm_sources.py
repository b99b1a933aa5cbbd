"""vLLM's Python sources of any version, read without importing them: what they define, and with which parameters."""

import ast
import inspect
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Found(NamedTuple):
    """Where a name is defined, and its definition; None: a value, or a module."""

    module: str
    node: Definition | None


class Sources:
    """The sources of a package in a folder of its name."""

    def __init__(self, root: Path) -> None:
        self.root, self.trees = root, dict[str, ast.Module | None]()

    def tree(self, module: str) -> ast.Module | None:
        if module not in self.trees:
            path = self.root.parent.joinpath(*module.split("."))
            file = next((one for one in (path / "__init__.py", path.with_suffix(".py")) if one.is_file()), None)
            self.trees[module] = ast.parse(file.read_text(encoding="utf-8")) if file else None
        return self.trees[module]

    def find(self, module: str, name: str) -> Found | None:
        """Return where a name that can be imported from a module is defined; None: it has none."""
        tree = self.tree(module)
        if tree is None:
            return None
        for node in _statements(tree.body):
            if isinstance(node, Definition) and node.name == name:
                return Found(module, node)
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                if found := self.find(self._absolute(module, node), name):
                    return found
            elif isinstance(node, ast.ImportFrom) and name in [one.asname or one.name for one in node.names]:
                original = next(one.name for one in node.names if (one.asname or one.name) == name)
                return self.find(self._absolute(module, node), original) or Found(module, None)
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
                return self._behind(module, node) or Found(module, None)
        lazy = [text for text in _strings(tree) if text.startswith(".") and text.endswith(f":{name}")]
        if lazy:  # of a package that imports what it offers when it is asked for
            return self.find(module + lazy[0].partition(":")[0], name)
        return Found(f"{module}.{name}", None) if self.tree(f"{module}.{name}") else None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = self.root.parent.joinpath(*module.split("."), "__init__.py").is_file()
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join([*parts, *filter(None, [node.module])])

    def _behind(self, module: str, node: ast.Assign | ast.AnnAssign) -> Found | None:
        """What `name = other` stands for."""
        return self.find(module, node.value.id) if isinstance(node.value, ast.Name) else None

    def line(self, found: Found) -> list[tuple[str, ast.ClassDef]]:
        """Return a class and those that it inherits from, as far as they are in the sources."""
        classes = [(found.module, found.node)]
        assert isinstance(found.node, ast.ClassDef)
        for base in found.node.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(name, ast.Name) and (parent := self.find(found.module, name.id)) and parent.node:
                classes += self.line(parent)
        return classes

    def members(self, found: Found) -> dict[str, Definition | None]:
        """Return the methods of a class, and with None its other attributes."""
        members: dict[str, Definition | None] = {}
        for _, node in reversed(self.line(found)):
            own = [one for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)]
            members |= {one.attr: None for one in own if isinstance(one.value, ast.Name) and one.value.id == "self"}
            for one in _statements(node.body):
                members |= {one.name: one} if isinstance(one, Definition) else dict.fromkeys(_targets(one))
        return members

    def signature(self, found: Found) -> inspect.Signature | None:
        """Return the parameters with which a function or class is called; None: not known."""
        if isinstance(found.node, ast.ClassDef):
            for _, node in self.line(found):
                made = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
                if made:
                    return signature_of(made[0], method=True)
                if _has_fields(node):
                    return self._of_fields(found)
            return None
        return signature_of(found.node) if found.node else None

    def _of_fields(self, found: Found) -> inspect.Signature:
        fields: dict[str, bool] = {}
        for _, node in reversed(self.line(found)):
            for one in _statements(node.body):
                if isinstance(one, ast.AnnAssign) and "ClassVar" not in ast.unparse(one.annotation):
                    optional = one.value is not None or "NotRequired" in ast.unparse(one.annotation)
                    fields |= dict.fromkeys(_targets(one), optional)
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        ordered = sorted(fields, key=lambda name: fields[name])
        options = {True: {"default": None}, False: {}}
        return inspect.Signature([inspect.Parameter(name, kind, **options[fields[name]]) for name in ordered])

    @cached_property
    def version(self) -> str:
        tree = self.tree(f"{self.root.name}._version")
        return next((text for text in _strings(tree) if text[:1].isdigit()), "unknown") if tree else "unknown"


def signature_of(node: ast.FunctionDef | ast.AsyncFunctionDef, *, method: bool = False) -> inspect.Signature:
    """Return a function's parameters; of a method without the first one, unless it is static."""
    given, kinds = node.args, inspect.Parameter
    without = len(given.posonlyargs + given.args) - len(given.defaults)
    positional = [
        kinds(one.arg, kinds.POSITIONAL_OR_KEYWORD, default=kinds.empty if index < without else None)
        for index, one in enumerate(given.posonlyargs + given.args)
    ]
    is_static = any(isinstance(one, ast.Name) and one.id == "staticmethod" for one in node.decorator_list)
    parameters = positional[1:] if method and not is_static else positional
    if given.vararg:
        parameters.append(kinds(given.vararg.arg, kinds.VAR_POSITIONAL))
    for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        parameters.append(kinds(one.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None))
    if given.kwarg:
        parameters.append(kinds(given.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)


def why_not_callable(signature: inspect.Signature, call: ast.Call) -> str:
    """Return why a call does not fit parameters; "" if it does."""
    spread = any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords)
    values = [one for one in call.args if not isinstance(one, ast.Starred)]
    named = {one.arg: one.value for one in call.keywords if one.arg}
    try:
        (signature.bind_partial if spread else signature.bind)(*values, **named)
    except TypeError as error:
        return f"{ast.unparse(call)}: {error}"
    return ""


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, also those in conditions."""
    for node in body:
        yield node
        for name in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                yield from _statements(getattr(node, name, []))


def _targets(node: ast.AST) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [one.id for one in targets if isinstance(one, ast.Name)]


def _strings(tree: ast.Module) -> list[str]:
    return [one.value for one in ast.walk(tree) if isinstance(one, ast.Constant) and isinstance(one.value, str)]


def _has_fields(node: ast.ClassDef) -> bool:
    marks = [ast.unparse(one) for one in [*node.decorator_list, *node.bases]]
    return any(word in mark for mark in marks for word in ("dataclass", "Struct", "TypedDict", "config"))

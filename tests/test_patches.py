"""What tests and scripts assign to a module or a class of hybridrl exists there: otherwise they replace nothing.

Nothing is imported: files that only a GPU runs are read too.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TOP = Path(__file__).parent.parent
FILES = sorted([*TOP.glob("tests/**/*.py"), *TOP.glob("scripts/**/*.py")])
Names = dict[str, str]  # full names of what is imported from hybridrl, by the names that it has in a file


def imported_names(tree: ast.AST) -> Names:
    full = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            full |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            full |= {alias.asname: alias.name for alias in node.names if alias.asname}
            full |= {alias.name.split(".")[0]: alias.name.split(".")[0] for alias in node.names if not alias.asname}
    return {name: meaning for name, meaning in full.items() if meaning.split(".")[0] == "hybridrl"}


def bound(node: ast.AST) -> set[str]:
    """Names that a function's parameters and assignments hide from it."""
    inner = list(ast.walk(node))
    return {child.arg for child in inner if isinstance(child, ast.arg)} | {
        child.id for child in inner if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store)
    }


def assignments(node: ast.AST, names: Names) -> Iterator[tuple[int, str]]:
    """Line and full target of what is assigned: `a.b = c` and `setattr(a, "b", c)` of any owner assign to a.b."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        hidden = bound(node)
        names = {name: full for name, full in names.items() if name not in hidden}
    target = ""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
        target = ast.unparse(node)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("setattr", "delattr", "object"):
        match node.args:
            case [ast.Constant(value=str(text)), *_]:
                target = text
            case [owner, ast.Constant(value=str(name)), *_]:
                target = f"{ast.unparse(owner)}.{name}"
    root, *path = target.split(".")
    if path and (root in names or root == "hybridrl"):
        yield getattr(node, "lineno", 0), ".".join([names.get(root, root), *path])
    for child in ast.iter_child_nodes(node):
        yield from assignments(child, names)


@cache
def contents(name: str) -> dict[str, ast.AST] | None:
    """What a module of hybridrl defines or imports, by name; None if there is no such module."""
    path = TOP.joinpath(*name.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return definitions(ast.parse(file.read_text(encoding="utf-8"))) if file.is_file() else None


def definitions(owner: ast.AST) -> dict[str, ast.AST]:
    """What the body of a module or a class binds, also below `if` and `try`."""
    names: dict[str, ast.AST] = {}
    for node in ast.iter_child_nodes(owner):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.split(".")[0]: node for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id] = node
        elif not isinstance(node, ast.Lambda):
            names |= definitions(node)
    return names


def exists(name: str) -> bool:
    """Whether a full name of hybridrl is that of a module, of something in a module, or of something in a class. What
    instances have, and what comes from a library, is not known here and counts as existing."""
    module, _, attribute = name.rpartition(".")
    if not module or contents(name) is not None:
        return True
    if (known := contents(module)) is not None:
        return attribute in known
    if not exists(module):
        return False
    home, _, owner = module.rpartition(".")
    node = (contents(home) or {}).get(owner)
    if isinstance(node, ast.ImportFrom):
        original = next(alias.name for alias in node.names if owner in (alias.asname, alias.name))
        origin = f"{node.module}.{original}"
        return not origin.startswith("hybridrl.") or exists(f"{origin}.{attribute}")
    if not isinstance(node, ast.ClassDef) or attribute in definitions(node):
        return True
    return any(
        exists(f"{home}.{ast.unparse(base)}.{attribute}") for base in node.bases if ast.unparse(base) != "Protocol"
    )


def missing(file: Path, text: str) -> list[str]:
    tree = ast.parse(text)
    targets = assignments(tree, imported_names(tree))
    return [f"{file}:{line}: {target} does not exist" for line, target in targets if not exists(target)]


def unreasoned(file: Path, text: str) -> list[str]:
    """Calls that may create what they replace (raising=False) without a comment that says why."""
    lines = text.splitlines()
    return [
        f"{file}:{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr"
        if any(word.arg == "raising" for word in node.keywords) and "#" not in lines[(node.end_lineno or 1) - 1]
    ]


@pytest.mark.parametrize("rule", [missing, unreasoned])
def test_tests_and_scripts_replace_only_what_exists(rule):
    assert [line for file in FILES for line in rule(file.relative_to(TOP), file.read_text(encoding="utf-8"))] == []


IMPORTS = "import hybridrl.core.trainer\nfrom hybridrl.core import trainer as modules\n"
IMPORTS += "from hybridrl.core.trainer import Schedule\n"


@pytest.mark.parametrize(
    "line",
    [
        "modules.{0} = 4",
        "modules.Schedule.{0} = 4",
        "Schedule.{0} = None",
        "del Schedule.{0}",
        "hybridrl.core.trainer.{0}, other = 1, 2",
        'monkeypatch.setattr(modules, "{0}", 4)',
        'monkeypatch.setattr("hybridrl.core.trainer.{0}", 4)',
        'setattr(modules.Schedule, "{0}", 4)',
        'patch.object(modules.Schedule, "{0}")',
    ],
)
def test_an_assignment_to_what_does_not_exist_is_found(line):
    exists = "validates" if "Schedule" in line else "Trainer"
    assert len(missing(Path("file.py"), IMPORTS + line.format("gone"))) == 1
    assert len(missing(Path("file.py"), IMPORTS + line.format("Gone.validates"))) == 1
    assert missing(Path("file.py"), IMPORTS + line.format(exists)) == []


def test_a_call_that_may_create_what_it_replaces_says_why():
    call = 'monkeypatch.setattr(modules, "gone", 4, raising=False)'
    assert len(unreasoned(Path("file.py"), call)) == 1
    assert unreasoned(Path("file.py"), f"{call}  # only some versions of it have it") == []

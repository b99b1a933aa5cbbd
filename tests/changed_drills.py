"""The drills that a change calls for: `pytest --collect-only -q -m drill | python -m tests.changed_drills FILE ...`

Prints those of the collected drills whose script is among the changed files, or uses one of them: a script next to it,
or a module of hybridrl, that it imports or names. What these modules import in turn is not followed, as that would be
all of the package.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

TOP = Path(__file__).parent.parent
DRILL = re.compile(r"^tests/integration/test_scripts\.py::\w+\[(?P<script>[^ \]]+).*\]$")


def script_of(name: str) -> str:
    return name if "/" in name else f"scripts/benchmark/{name}.py"


def called_for(drills: Iterable[str], changed: set[str]) -> Iterator[str]:
    """Yield the drills of scripts that changed, or use what changed; paths begin at the top of the checkout."""
    for drill in drills:
        if (of_script := DRILL.match(drill)) and changed & {*_used(TOP / script_of(of_script["script"]), set())}:
            yield drill


def _used(file: Path, seen: set[Path]) -> Iterator[str]:
    """Yield a script and the files that it uses."""
    seen.add(file)
    yield file.relative_to(TOP).as_posix()
    for name in _names(ast.parse(file.read_text(encoding="utf-8"))):
        if name.startswith("hybridrl"):
            module = TOP / name.replace(".", "/")
            yield from (
                path.relative_to(TOP).as_posix() for path in (module.with_suffix(".py"), module / "__init__.py")
            )
        elif (other := file.with_name(name.removesuffix(".py") + ".py")).is_file() and other not in seen:
            yield from _used(other, seen)


def _names(tree: ast.Module) -> Iterator[str]:
    """Yield the modules that a script imports, and the modules and files that stand in its strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"hybridrl(?:\.\w+)+|\w+\.py\b", node.value)


if __name__ == "__main__":
    for called in called_for(sys.stdin.read().splitlines(), {*sys.argv[1:]}):
        print(called)

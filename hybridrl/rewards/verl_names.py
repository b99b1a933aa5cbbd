"""What a reward file that imports from verl is told: the modules here that do the same."""

import ast
import importlib.util
from collections.abc import Iterator

from hybridrl.config import ConfigError

_PACKAGE = "verl.utils.reward_score"
_HERE = "hybridrl.rewards.scorers"
EQUIVALENTS = {
    f"{_PACKAGE}.gsm8k": f"{_HERE}.gsm8k",
    f"{_PACKAGE}.math": f"{_HERE}.math",
    f"{_PACKAGE}.math_reward": f"{_HERE}.math",
    f"{_PACKAGE}.math_verify": f"{_HERE}.math",
    f"{_PACKAGE}.math_batch": f"{_HERE}.math",
    f"{_PACKAGE}.prime_math": f"{_HERE}.math",
    f"{_PACKAGE}.math_dapo": f"{_HERE}.math_dapo",
    f"{_PACKAGE}.prime_code": f"{_HERE}.code",
    f"{_PACKAGE}.sandbox_fusion": f"{_HERE}.code",
    f"{_PACKAGE}.search_r1_like_qa_em": f"{_HERE}.search_qa",
    f"{_PACKAGE}.default_compute_score": "hybridrl.rewards.built_in.compute_score",
    _PACKAGE: "hybridrl.rewards.built_in",
}


def refuse_verl_imports(source: str, path: str, key: str) -> None:
    """ConfigError where the file needs a verl that is not installed; an import within `try` may fail."""
    if importlib.util.find_spec("verl") is not None:
        return
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # importing it will say so
        return
    found = [(line, name) for line, name in _imports(tree) if name == "verl" or name.startswith("verl.")]
    if found:
        told = "; ".join(f"line {line} imports {name}, {_advice(name)}" for line, name in found)
        raise ConfigError(f"{key}={path}: verl is not installed, and {told}")


def _advice(name: str) -> str:
    """By the longest beginning that has an equivalent."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        here = EQUIVALENTS.get(".".join(parts[:count]))
        if here is not None:
            return f"which is {here} here"
    return "which has no equivalent here: take what it needs into the file"


def _imports(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full name of all that is imported outside of `try`: `from a import b` is a.b."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((child.lineno, alias.name) for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and not child.level:
            yield from ((child.lineno, f"{child.module}.{alias.name}") for alias in child.names)
        elif not isinstance(child, ast.Try):
            yield from _imports(child)

"""Every failure of tests/failures.yaml names a test that exists, and that a machine without a GPU runs."""

import ast
from pathlib import Path

import pytest
import yaml

TESTS = Path(__file__).parent
GROUPS = yaml.safe_load((TESTS / "failures.yaml").read_text(encoding="utf-8"))
FAILURES = [(failure, *test.split("::")) for group in GROUPS.values() for failure, test in group.items()]


def marks(file: str, name: str) -> set[str]:
    """Return the words in the marks of a test; an error if there is no such test."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    tests = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assigned = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    marked = [value for value in assigned if ast.unparse(value).startswith("pytest.mark")]
    return {word for node in marked + tests[f"test_{name}"].decorator_list for word in ast.unparse(node).split(".")}


@pytest.mark.parametrize(("failure", "file", "name"), FAILURES, ids=[failure for failure, *_ in FAILURES])
def test_a_failure_has_a_test_that_runs(failure: str, file: str, name: str) -> None:
    assert not marks(file, name) & {"gpu", "skip", "xfail"}

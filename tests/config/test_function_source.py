"""Functions of scripts and cells become files with everything that they use, or are rejected by the name of what cannot
be written."""

import importlib
import linecache
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hybridrl.config import ConfigError
from hybridrl.config.custom_code import load_function
from hybridrl.config.function_source import function_file


class Notebook:
    """Cells that are executed one after another in the module `__main__`, whose sources only linecache knows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module = ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", self.module)
        monkeypatch.setattr(linecache, "cache", dict(linecache.cache))

    def run(self, *cells: str) -> dict[str, Any]:
        for text in cells:
            file = f"/nowhere/ipykernel_1/{abs(hash(text))}.py"
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
            exec(compile(text, file, "exec"), vars(self.module))
        return vars(self.module)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    return Notebook(monkeypatch)


def written(function: Callable[..., Any], directory: Path) -> Callable[..., Any]:
    """The function as another process loads it from the file."""
    path, name = function_file(function, directory / "reward.py", "reward")
    return load_function(f"{path}:{name}", "reward")


CELLS = (
    "import re\nimport math as m\nfrom fractions import Fraction as F\nfrom os import path as where",
    "HALF = 0.5\nNAMES = {'a': [1, None], 'b': (True, {2})}\nPATTERN = re.compile(r'=(\\d+)', re.I)",
    "def helper(text):\n    return PATTERN.findall(text) or base(text)\n\ndef base(text):\n    return ['0', where.sep]",
    "class Grade:\n    best = HALF\n    def __init__(self, text):\n        self.value = F(helper(text)[0])",
    "def score(solution_str, ground_truth, weight=HALF):\n"
    "    return [float(Grade(solution_str).value) * weight, m.floor(2.5), NAMES['b'][1], Grade.best]",
)


def test_what_a_function_of_cells_uses_comes_along(notebook: Notebook, tmp_path: Path) -> None:
    score = written(notebook.run(*CELLS)["score"], tmp_path)
    assert score("x=8", "") == [4.0, 2, {2}, 0.5]
    assert score("nothing", "") == [0.0, 2, {2}, 0.5]


def test_nothing_else_of_the_notebook_comes_along(notebook: Notebook, tmp_path: Path) -> None:
    """Locals with the name of a global are not that global, and what nothing uses may be anything."""
    members = notebook.run(
        "rows = open('/dev/null')\ntext = 'global'", "def score(text):\n    rows = [text]\n    return rows"
    )
    assert written(members["score"], tmp_path)("local") == ["local"]
    assert "global" not in (tmp_path / "reward.py").read_text()


def test_the_values_and_definitions_of_the_last_cells_count(notebook: Notebook, tmp_path: Path) -> None:
    members = notebook.run("LIMIT = 1\ndef score():\n    return LIMIT", "LIMIT = 2")
    assert written(members["score"], tmp_path)() == 2
    members = notebook.run("def score():\n    return LIMIT + 10")
    assert written(members["score"], tmp_path)() == 12


@pytest.mark.parametrize(
    ("cell", "result"),
    [
        ("import functools\n@functools.cache\ndef size(x):\n    return len(x)\ndef score():\n    return size('a')", 1),
        ("def score(n=3):\n    return 1 if n < 2 else n * score(n - 1)", 6),
        ("def even(n):\n    return n == 0 or odd(n - 1)\ndef odd(n):\n    return n > 0 and even(n - 1)\n"
         "def score():\n    return even(4)", True),
        ("def score():\n    return 1\nscored = score\ndef score():\n    return scored.__name__", "score"),
        ("COUNT = 4\ndef score():\n    global COUNT\n    COUNT += 1\n    return COUNT", 5),
        ("import xml.etree.ElementTree\ndef score():\n    return xml.etree.ElementTree.fromstring('<a/>').tag", "a"),
        ("from typing import Any\nNumber = dict[str, object()] if 0 else object()\n"
         "def score(x: Number = None) -> 'Any':\n    return x", None),
        ("from enum import Enum\nclass Kind(Enum):\n    A = 7\ndef score():\n    return Kind.A.value", 7),
        ("from dataclasses import dataclass\n@dataclass\nclass Pair:\n    a: int\n    b: int = 2\n"
         "def score():\n    return Pair(1).b", 2),
        ("class Base:\n    a = 1\nclass Next(Base):\n    def get(self):\n        return super().__init__() or self.a\n"
         "def score():\n    return Next().get()", 1),
    ],
)  # fmt: skip
def test_definitions_of_every_kind_are_written(notebook: Notebook, tmp_path: Path, cell: str, result: object) -> None:
    assert written(notebook.run(cell)["score"], tmp_path)() == result


def test_coroutines_are_written(notebook: Notebook, tmp_path: Path) -> None:
    function = written(
        notebook.run("import asyncio\nasync def score():\n    await asyncio.sleep(0)")["score"], tmp_path
    )
    assert function().close() is None


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("score = lambda: 1", "reward=<lambda> uses a lambda, whose source is only a part of a line; define"),
        ("norm = lambda: 1\ndef score():\n    return norm()", "reward=score uses a lambda"),
        ("def make(limit):\n    def score():\n        return limit\n    return score\nscore = make(3)",
         "reward=score uses limit of the function around it; pass it as a global constant"),
        ("class Grader:\n    def grade(self):\n        return 1\nscore = Grader().grade",
         "reward=grade is a bound method"),
        ("class Grader:\n    def __call__(self):\n        return 1\nscore = Grader()",
         "reward=Grader is of type Grader"),
        ("import functools\nscore = functools.partial(int, base=2)", "reward=partial is of type partial"),
        ("score = len", "reward=len is of type builtin_function_or_method"),
        ("client = object()\ndef score():\n    return client",
         "reward=score uses the variable client of type object; create it within the function"),
        ("LIMIT = float('nan')\ndef score():\n    return LIMIT", "the variable LIMIT of type float"),
        ("import numpy\nTABLE = numpy.zeros(2)\ndef score():\n    return TABLE", "the variable TABLE of type ndarray"),
        ("def score():\n    return undefined_name", "the name undefined_name, which is not defined; define it first"),
        ("exec('def score(): return 1')", "score, whose source cannot be read"),
        ("from collections import namedtuple\nPair = namedtuple('Pair', 'a')\ndef score():\n    return Pair(1)",
         "Pair, whose source cannot be read (0 different classes of this name are in cells)"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_named_with_the_fix(
    notebook: Notebook, tmp_path: Path, cell: str, message: str
) -> None:
    function = notebook.run(cell)["score"]
    with pytest.raises(ConfigError) as error:
        function_file(function, tmp_path / "reward.py", "reward")
    assert message in str(error.value) and "path.py:function" in str(error.value)
    assert not (tmp_path / "reward.py").exists()


def test_two_classes_without_methods_and_of_one_name_are_not_guessed_between(
    notebook: Notebook, tmp_path: Path
) -> None:
    members = notebook.run("class Sizes:\n    a = 1", "class Sizes:\n    a = 2", "def score():\n    return Sizes.a")
    with pytest.raises(ConfigError, match="2 different classes of this name"):
        function_file(members["score"], tmp_path / "reward.py", "reward")


SCRIPT = """
from hybridrl.config.function_source import function_file
from helpers import double
from pathlib import Path
LIMIT = 3

def score(solution_str):
    return double(LIMIT)

print(*function_file(score, Path("inputs/reward.py"), "reward"))
"""


def test_a_function_of_a_script_is_written_without_starting_the_script_and_finds_modules_next_to_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "helpers.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "there" / "script.py").write_text(SCRIPT)
    command = [sys.executable, tmp_path / "there" / "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "inputs/reward.py score\n"
    code = "import reward; print(reward.score(''))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "inputs", capture_output=True, text=True, check=True
    )
    assert done.stdout == "6\n"


def test_a_function_of_a_module_is_named_by_its_file_and_one_of_a_package_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "grading").mkdir()
    (tmp_path / "grading" / "rules.py").write_text("LOCK = object()\ndef score():\n    return LOCK is not None\n")
    (tmp_path / "grader.py").write_text("LOCK = object()\ndef score():\n    return LOCK is not None\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("grader", "grading.rules"):
        module = importlib.import_module(name)
        monkeypatch.setitem(sys.modules, name, module)
        assert written(module.score, tmp_path / name)() is True
    assert not (tmp_path / "grader").exists()
    assert "from grading.rules import score" in (tmp_path / "grading.rules" / "reward.py").read_text()


def test_a_file_of_the_same_content_is_not_written_again(notebook: Notebook, tmp_path: Path) -> None:
    score = notebook.run("def score():\n    return 1")["score"]
    function_file(score, tmp_path / "reward.py", "reward")
    before = (tmp_path / "reward.py").stat()
    function_file(score, tmp_path / "reward.py", "reward")
    assert (tmp_path / "reward.py").stat().st_ino == before.st_ino

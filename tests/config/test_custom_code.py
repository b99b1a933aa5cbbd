import ast
import importlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config import ConfigError, custom_code
from hybridrl.config.custom_code import load_function, once, own, publish_own_keys

KEY = "algorithm.adv_estimator"


def test_the_function_named_is_loaded_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("FACTOR = 3\ndef triple(x): return FACTOR * x\n")
    assert load_function(f"{tmp_path}/own.py:triple", KEY)(5) == 15


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def other(): pass\n", "{file}:f: own.py has no function f; it has other"),
        ("f = 3\n", "{file}:f: own.py has no function f; it has none"),
        ("\nx = y\n", "{file} does not import: NameError: name 'y' is not defined ({file}:2)"),
        ("def f(:\n", "{file} does not import: SyntaxError: invalid syntax ({file}:1)"),
        ("import nothing_\n", "{file} does not import: ModuleNotFoundError: No module named 'nothing_' ({file}:1)"),
    ],
)  # fmt: skip
def test_a_file_without_the_function_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_function(f"{file}:f", KEY)
    assert str(caught.value) == f"{KEY}={message.format(file=file)}"


def test_a_file_that_is_not_there_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"own.py: there is no such file"):
        load_function(f"{tmp_path}/own.py:f", KEY)


def test_own_keys_are_found_in_the_environment_of_processes_started_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDRL_OWN", "")
    publish_own_keys({"bonus": 0.5, "deep": {"names": ["a"]}})
    code = "import json, os; print(json.loads(os.environ['HYBRIDRL_OWN'])['deep']['names'][0])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "a\n"


def test_a_function_that_threads_enter_together_is_called_once_for_each_argument():
    calls = []

    @once
    def slow(number: int) -> object:
        calls.append(number)
        time.sleep(0.02)
        return object()

    assert [len(set(in_threads(partial(slow, number)))) for number in (1, 2)] == [1, 1]
    assert calls == [1, 2]


def in_threads(call: Callable[[], Any]) -> list[int]:
    """Return the identities of what 64 threads get that call at the same time."""
    barrier = threading.Barrier(64)
    with ThreadPoolExecutor(64) as pool:
        results = [*pool.map(lambda _: barrier.wait(20) is None or call(), range(64))]
    return [*map(id, results)]


PACKAGE = Path(custom_code.__file__).parent.parent
THREADED = ("agents", "compat", "rewards")  # packages whose functions threads enter
# Those whose results are values: one that is computed twice is as good as the first.
VALUES = {"scorer_of", "_truth", "rewards.load:_load"}
ARGUMENTS = {
    "_import_once": ("pkg://json", "key"),
    "_interactions": (None,),
    "_tools": ("{}", None, None, (), 1.0),
    "placeholder": ("verl.some.Class",),
    "provide_libraries": ((),),
}


def test_what_must_exist_once_exists_once_in_64_threads(tmp_path):
    (tmp_path / "one.py").write_text("class One:\n    def reset(self, _): ...\n    def step(self, _): ...")
    (tmp_path / "loops.yaml").write_text("[{name: one, _target_: tests.integration.agents.EchoLoop}]")
    more = {"environment_class": (f"{tmp_path / 'one.py'}:One",), "_load": (str(tmp_path / "loops.yaml"),)}
    found = []
    for file in [*(file for name in THREADED for file in (PACKAGE / name).rglob("*.py")), Path(custom_code.__file__)]:
        module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
        for node in ast.parse(file.read_text()).body:
            decorators = " ".join(map(ast.unparse, getattr(node, "decorator_list", ())))
            known = {getattr(node, "name", ""), f"{module}:{getattr(node, 'name', '')}"} & VALUES
            if isinstance(node, ast.FunctionDef) and re.search("cache|once", decorators) and not known:
                assert decorators == "once", f"{module}: threads may enter {node.name} together: use once"
                found.append((module, node.name))
    assert len(found) >= 9
    for module, name in found:
        function = getattr(importlib.import_module(f"hybridrl.{module}"), name)
        assert len(set(in_threads(partial(function, *(ARGUMENTS | more).get(name, ()))))) == 1


def test_a_value_for_custom_code_is_a_copy_unless_it_is_called():
    given = {"tuple": ([1],), "set": {1}, "function": print}
    copied, bound = own(given), own(partial(dict, inner=[1]))
    assert copied == given and bound.keywords == {"inner": [1]} and copied["function"] is print
    assert copied["set"] is not given["set"] and copied["tuple"][0] is not given["tuple"][0]

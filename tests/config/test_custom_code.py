import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.config import ConfigError
from hybridrl.config.custom_code import load_function, publish_own_keys

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

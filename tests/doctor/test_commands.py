"""Commands of the doctor: their arguments, results and exit statuses, in one form."""

import argparse
import json
import subprocess
import sys

import pytest
from rich.table import Table

from hybridrl.config import ConfigError
from hybridrl.config.findings import Findings
from hybridrl.doctor import KEYS, Command, Result, argument
from hybridrl.runtime import keeper

from .conftest import Doctor

HELP = """
import sys
from hybridrl.doctor.__main__ import FIRST_LEVEL, command, uses

for name in (*FIRST_LEVEL, *uses()):
    try:
        command(name, ["--help"])
    except SystemExit as ended:
        assert ended.code == 0
print(*sys.modules)
"""


def findings() -> Findings:
    collected = Findings()
    collected.error("a.code", "a cause", "a fix")
    return collected


def table() -> Table:
    table = Table("step", "score")
    table.add_row("1", "0.5")
    return table


@pytest.mark.parametrize(
    ("result", "status", "shown", "data"),
    [
        ("a text", 0, "a text\n", "a text"),
        ({"name": "x", "size": 0, "empty": ""}, 0, "name   x\nsize   0\n", {"name": "x", "size": 0, "empty": ""}),
        (Result([1], ["one", {"a": "b"}], failed=True), 1, "one\na  b\n", [1]),
        (Result(None, [lambda console: f"{console.is_terminal}"]), 0, "False\n", None),
        (table(), 0, "0.5", {"columns": ["step", "score"], "rows": [["1", "0.5"]]}),
        (findings(), 1, "error [a.code] a cause\n      -> a fix\n1 error\n", None),
    ],
    ids=["text", "dict", "result", "function of the console", "table", "findings"],
)
def test_a_result_is_printed_for_people_and_for_programs(capsys, result, status, shown, data) -> None:
    command = Command("N: returns it", [argument("number", type=int)], lambda options: result)
    assert command.main("mine", ["3"]) == status
    assert shown in capsys.readouterr().out
    assert command.main("mine", ["3", "--json"]) == status
    printed = json.loads(capsys.readouterr().out)
    assert printed["findings"][0]["code"] == "a.code" if isinstance(result, Findings) else printed == data


@pytest.mark.parametrize(("rejection", "status"), [("", 2), ("mine.rejected", 1)])
def test_an_input_that_is_rejected_is_an_error_or_a_finding(capsys, rejection: str, status: int) -> None:
    def run(options: argparse.Namespace) -> str:
        print("working")
        raise ConfigError("a cause", fix="a fix")

    command = Command("fails", [], run, rejection=rejection)
    assert command.main("mine", []) == status
    printed = capsys.readouterr()
    text = "mine\n  error [mine.rejected] a cause\n      -> a fix\n1 error\n" if rejection else ""
    assert printed.out == text and printed.err == "working\n" + "error: a cause; a fix\n" * (not rejection)
    assert command.main("mine", ["--json"]) == status
    assert json.loads(capsys.readouterr().out)["findings"][0]["code"] == (rejection or "input")


def test_keys_may_be_between_options_and_other_words_are_rejected(capsys) -> None:
    command = Command("key=value ...: shows them", [*KEYS, argument("--steps")], lambda options: options.overrides)
    assert command.main("mine", ["a=1", "--steps", "3", "~b", "--json", "c=2"]) == 0
    assert json.loads(capsys.readouterr().out) == ["a=1", "~b", "c=2"]
    for words in (["--step", "3"], ["a=1", "--other"]):
        with pytest.raises(SystemExit, match="2"):
            command.main("mine", words)
        assert "unknown option --" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["explain", "clip_ratio"], ["explain", "data.seed"], ["explain", "actor/entropy"], ["clean"]]
)
def test_a_result_that_is_data_is_printed_as_json(doctor: Doctor, tmp_path, monkeypatch, words: list[str]) -> None:
    monkeypatch.setattr(keeper, "ROOT", tmp_path)
    status, output = doctor(*words, "--json")
    assert status == 0 and json.loads(output)


def test_help_and_the_list_of_commands_import_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    *shown, modules = done.stdout.splitlines()
    assert sum(line.startswith("usage: ") for line in shown) == 12
    assert not {"torch", "ray", "transformers", "vllm"} & {*modules.split()}

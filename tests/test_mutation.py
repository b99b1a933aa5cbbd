"""Mutation testing: the files that scripts/mutation.sh names exist, and its exit status is that of the score."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parent.parent
SCRIPT = runpy.run_path(str(TOP / "scripts" / "mutation.py"))
KERNELS = SCRIPT["KERNELS"]


def mutants(count: int, file: str = "hybridrl/core/training/packing.py") -> list:
    return [SCRIPT["Mutant"](number, file, 1, "", (TOP / file).read_text()) for number in range(count)]


def test_every_mutated_file_and_its_tests_exist():
    algorithms = {str(path.relative_to(TOP)) for path in TOP.glob("hybridrl/core/algorithms/[!_]*.py")}
    assert algorithms <= SCRIPT["TESTS"].keys()
    paths = [f"tests/{path.partition('::')[0]}" for tests in SCRIPT["TESTS"].values() for path in tests.split()]
    assert [path for path in [*SCRIPT["TESTS"], *paths] if not (TOP / path).exists()] == []


def test_the_faults_are_planted_in_the_kernels_each_in_text_that_occurs_once():
    before = (TOP / KERNELS).read_text(encoding="utf-8")
    faults = SCRIPT["planted"](301)
    assert [fault.number for fault in faults] == list(range(301, 332))
    assert len({fault.source for fault in faults} - {before}) == 31
    for fault in faults:
        changed = zip(before.splitlines(), fault.source.splitlines(), strict=True)
        assert [number for number, (old, new) in enumerate(changed, start=1) if old != new] == [fault.line]


@pytest.mark.parametrize(
    ("alive", "kernels_alive", "status", "score"),
    [(1, 0, 0, "9 of 10 killed, 90.0%"), (2, 0, 1, "8 of 10 killed, 80.0%"), (0, 1, 1, "10 of 10 killed, 100.0%")],
)
def test_a_score_below_nine_in_ten_fails_and_so_does_a_fault_of_a_kernel_that_survives(
    capsys, alive, kernels_alive, status, score
):
    drawn, faults = mutants(10), mutants(20, KERNELS)
    assert SCRIPT["report"]([*drawn, *faults], [*drawn[:alive], *faults[:kernels_alive]]) == status
    assert f"mutants: {score}\nfaults of the kernels: {20 - kernels_alive} of 20 killed" in capsys.readouterr().out


def test_help_needs_no_tool_and_starts_nothing():
    command = [sys.executable, str(TOP / "scripts" / "mutation.py"), "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    assert "--seed" in shown and "--only" in shown

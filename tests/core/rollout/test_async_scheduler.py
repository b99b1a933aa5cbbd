"""The engine's loop and its responses under vLLM's asynchronous scheduler with two iterations in flight, which is its
default on GPUs, compared with the synchronous one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT, TOP = Path(__file__).with_name("on_async_scheduler.py"), Path(__file__).parents[3]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """The lines that the script prints for each scheduler; both run at the same time."""
    directory = tmp_path_factory.mktemp("tiny")
    make_data = TOP / "recipes" / "quickstart" / "make_data.py"
    subprocess.run([sys.executable, make_data, "--out", directory], check=True, cwd=TOP)
    # Threads of tiny products would wait for one another; they are made as torch is imported.
    environment, started = os.environ | {"PYTHONPATH": str(TOP), "OMP_NUM_THREADS": "1"}, []
    for kind in ("sync", "async"):
        command = [sys.executable, str(SCRIPT), str(directory / "model"), kind]
        options = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, **options))
    ended = [(process.communicate(timeout=300), process.returncode) for process in started]
    assert [code for _, code in ended] == [0, 0], "\n".join(errors for (_, errors), _ in ended)
    synchronous, asynchronous = (json.loads(output.splitlines()[-1]) for (output, _), _ in ended)
    return synchronous, asynchronous


def test_two_iterations_are_in_flight_under_the_asynchronous_scheduler(results):
    assert [(one["scheduler"], one["queue"]) for one in results] == [("Scheduler", 1), ("AsyncScheduler", 2)]


@pytest.mark.parametrize("what", ["whole", "stopped by texts", "score"])
def test_tokens_log_probs_and_ends_are_those_of_the_synchronous_scheduler(results, what):
    synchronous, asynchronous = results
    assert asynchronous[what] == synchronous[what]
    if what == "stopped by texts":
        shorter = [
            len(one[0]) < len(other[0]) for one, other in zip(asynchronous[what], synchronous["whole"], strict=True)
        ]
        assert any(shorter), "no text has ended a response"


def test_interrupted_responses_begin_as_the_whole_ones_and_leave_nothing_behind(results):
    for one in results:
        lengths = [len(tokens) for tokens, _, _ in one["parts"]]
        assert 0 in lengths and max(lengths) > 1, "some wait, some run"
        assert all(one["interrupted"])
        for (tokens, log_probs, _), (whole, whole_log_probs, _) in zip(one["parts"], one["whole"], strict=True):
            assert tokens == whole[: len(tokens)] and log_probs == whole_log_probs[: len(tokens)]
        assert one["again"] == one["whole"]


def test_what_is_in_flight_is_finished_before_the_cache_is_emptied(results):
    assert [one["in flight"] for one in results] == [0, 1]
    assert [one["left in flight"] for one in results] == [0, 0]


def test_every_token_is_counted_once(results):
    for one in results:
        kinds = ("whole", "stopped by texts", "parts", "again")
        assert one["tokens"] == sum(len(tokens) for kind in kinds for tokens, _, _ in one[kind]) + 1  # the score's

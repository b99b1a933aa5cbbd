"""Custom code that forks, or starts processes: no score moves to another response, and nothing outlives its run."""

import os
import signal
import subprocess
import sys
import time

import pytest

from hybridrl.config.custom_code import EndingForks
from hybridrl.rewards import program
from hybridrl.rewards.pool import ScorerPool
from hybridrl.runtime import guard
from hybridrl.runtime.keeper import started_with
from tests.rewards.test_pool import requests, results, values, wait_until

FORKING = """
import asyncio, ctypes, multiprocessing, os, subprocess, sys, threading, time

def child(): return os.fork() == 0

def act(what):
    match what:
        case "exit" if child(): sys.exit(0)
        case "raise" if child(): raise ValueError("of the child")
        case "return" if child(): return -1.0
        case "C" if ctypes.CDLL(None).fork() == 0: return -1.0
        case "status":
            if (pid := os.fork()) == 0: sys.exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        case "thread": (thread := threading.Thread(target=child)).start() or thread.join()
        case "process": (one := multiprocessing.get_context("fork").Process(target=sys.exit)).start() or one.join()
        case "stay" if child(): time.sleep(600)
        case "session": subprocess.Popen(["sleep", "600"], start_new_session=True)
        case "daemon" if child():
            os.setsid()
            if child(): time.sleep(600)
            os._exit(0)

def plain(solution_str, ground_truth): return act(solution_str) or float(ground_truth)

async def coroutine(solution_str, ground_truth):
    await asyncio.sleep(0.001)
    wrong = act(solution_str)
    await asyncio.sleep(0.001)
    return wrong or float(ground_truth)

def together(solution_strs, ground_truths): return [*map(plain, solution_strs, ground_truths)]
"""
ACTS = ("exit", "raise", "return", "C", "status", "thread", "process", "stay", "session", "daemon")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", ["plain", "coroutine", "together"])
def test_a_reward_that_forks_costs_no_other_response_its_score_and_leaves_no_process(
    reward_config, started, tmp_path, name, workers
):
    manager = "batch" if name == "together" else "naive"
    config = reward_config(FORKING, name=name, num_workers=workers, manager=manager)
    texts = [ACTS[number // 7] if number % 7 == 3 and number // 7 < len(ACTS) else "fine" for number in range(100)]
    with ScorerPool(config, tmp_path / "reward.log") as pool:
        assert values(results(pool.submit(requests(*texts)))) == list(range(100))
        assert len(started()) > workers
    assert wait_until(lambda: not started())
    assert "of the child" in (tmp_path / "reward.log").read_text()


def test_a_file_that_forks_while_it_is_imported_has_one_process(reward_config):
    source = "import os, sys\nif os.fork() == 0: sys.exit(0)\ndef compute_score(): return os.getpid()"
    with ScorerPool(reward_config(source)) as pool:
        scores = results(pool.submit(requests(*["x"] * 20)))
    assert len({score.value for score in scores}) == 1


def test_a_process_that_collects_what_its_parent_had_begun_does_not_end_of_it():
    def begun():
        with EndingForks():
            yield

    next(generator := begun())
    if (pid := os.fork()) == 0:
        generator.close()
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5


HOLDS = """
import os, time
SHARED = b"x" * (200 << 20)
def compute_score(solution_str):
    count, size = map(int, solution_str.split())
    for _ in range(count):
        if os.fork() == 0:
            own = bytearray(os.urandom(1)) * (size << 20)
            time.sleep(600)
    time.sleep(1.5)
    return 1.0
"""


def test_memory_that_processes_share_counts_once_and_that_of_each_counts(reward_config):
    with ScorerPool(reward_config(HOLDS, more={"memory_mb": 500})) as pool:
        sharing, together = results(pool.submit(requests("4 5", "3 150")))
    assert (sharing.value, together.fault) == (1.0, "memory")


def test_the_log_of_a_reward_is_bounded_and_keeps_its_beginning_and_its_end(reward_config, tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "LOG_BYTES", 1 << 20)
    source = (
        "import time\ndef compute_score(solution_str): return time.sleep(0.02) or print(solution_str * 10_000) or 1"
    )
    with ScorerPool(reward_config(source), tmp_path / "reward.log") as pool:
        results(pool.submit(requests("first", *["line"] * 60, "last")))
    text = (tmp_path / "reward.log").read_text()
    assert len(text) < 3 << 19 and text.startswith("first") and text.rstrip().endswith("last") and "removed" in text


def test_what_a_process_that_has_ended_had_started_is_ended_too(started):
    one = program.Program("tests.rewards.test_forks", [])  # which cannot be imported there
    assert one.process.wait(20) == 1
    late = os.posix_spawn("/bin/sleep", ["sleep", "600"], os.environ | {program.PROGRAM: one.mark}, setsid=True)
    while late not in started_with(f"{program.PROGRAM}={one.mark}"):
        time.sleep(0.01)  # the environment of this process, which lacks the mark, is its own for a moment
    assert one.kill(0) == 1
    assert os.waitstatus_to_exitcode(os.waitpid(late, 0)[1]) == -signal.SIGKILL


STARTS_PROGRAMS = """
import os, signal
from hybridrl.runtime.keeper import started_with

for _ in range(100):
    process = os.posix_spawn("/bin/sleep", ["sleep", "60"], os.environ, setsid=True)
    print(process in started_with(f"STARTED_NOW={os.environ['STARTED_NOW']}"))
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
"""


def test_a_program_is_found_from_the_moment_it_was_started():
    """Without the wait for its environment a third of them were not."""
    environment = os.environ | {"STARTED_NOW": str(os.getpid())}
    done = subprocess.run([sys.executable, "-c", STARTS_PROGRAMS], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["True"] * 100, done.stderr


def test_a_program_that_has_no_environment_does_not_hold_up_the_search():
    process = os.posix_spawn("/bin/sleep", ["sleep", "60"], {})
    try:
        assert started_with("STARTED_NOW=never") == []
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)

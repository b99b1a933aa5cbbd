"""What processes are doing, asked from outside: real processes that compute, wait, are stopped, or do not respond."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hybridrl.runtime import stacks
from hybridrl.runtime.stacks import activities, place

ACTOR = """
import sys, time
from hybridrl.runtime.guard import begin_actor
begin_actor(sys.argv[1])
exec(sys.argv[2])
"""
IN_A_LIBRARY = "import threading; threading.Event().wait(60)"
WITH_THE_GIL = "sum(range(10**12))"  # one call in C that never lets another thread run


@pytest.fixture
def start(tmp_path, monkeypatch) -> Iterator[Callable[..., int]]:
    """Start a process that writes to a log and runs some code; it has begun once this returns."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    processes = []

    def begin(code: str, log: Path = tmp_path / "train-0.log") -> int:
        before = log.read_text() if log.exists() else ""
        command = [sys.executable, "-c", ACTOR, str(log), f"print('begins', flush=True)\n{code}"]
        processes.append(subprocess.Popen(command))
        while not log.exists() or log.read_text() == before:
            time.sleep(0.01)
        time.sleep(0.1)
        return processes[-1].pid

    yield begin
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize("code", [IN_A_LIBRARY, WITH_THE_GIL], ids=["waits", "holds the GIL"])
def test_a_process_writes_its_stacks_to_its_log_whatever_it_executes_and_goes_on(start, tmp_path, code):
    pid, log = start(code), str(tmp_path / "train-0.log")
    (activity,) = activities([log]).values()
    assert f"(pid {pid}) in " in activity
    assert "Current thread" in Path(log).read_text()
    assert activities([log]) == {log: activity}, "it was not disturbed"


def test_a_stopped_process_is_named_as_stopped(start, tmp_path):
    pid, log = start(IN_A_LIBRARY), str(tmp_path / "train-0.log")
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + 10
    while f"(pid {pid}) stopped (state T" not in activities([log])[log]:
        assert time.monotonic() < until


def test_a_process_that_would_die_of_the_request_is_not_asked(start, tmp_path):
    log = str(tmp_path / "train-0.log")
    pid = start("import signal; signal.signal(signal.SIGUSR1, signal.SIG_DFL)\nwhile True: pass")
    assert activities([log])[log].endswith(f"(pid {pid}) running")
    os.kill(pid, 0)


def test_every_process_that_writes_to_a_log_is_named_and_one_that_only_helps_is_not(start, tmp_path):
    helper = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    first = start(f"import subprocess\n{helper}\n{IN_A_LIBRARY}")
    second = start(WITH_THE_GIL)
    (activity,) = activities([str(tmp_path / "train-0.log")]).values()
    assert [part.split(")")[0].split("(")[1] for part in activity.split("; ")] == [f"pid {first}", f"pid {second}"]


def test_a_log_without_a_process_is_left_out(tmp_path):
    assert activities([str(tmp_path / "train-1.log")]) == {}


def test_two_processes_that_write_the_same_line_keep_it_in_both_logs(start, tmp_path):
    logs = [tmp_path / f"train-{rank}.log" for rank in (0, 1)]
    for log in logs:
        start("print('the same line', flush=True)", log)
        assert log.read_text() == "begins\nthe same line\n"


OWN = stacks.OWN[0]
COLLECTIVE = f"""
Thread 0x00007f01 (most recent call first):
  File "/lib/python3.11/threading.py", line 324 in wait
  File "/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f02 (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 3123 in all_reduce
  File "/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "{OWN}training/learner.py", line 143 in _gradient
  File "{OWN}training/worker.py", line 205 in update_policy
  File "/site-packages/ray/_private/worker.py", line 1000 in main_loop
"""
IN_ANOTHER_THREAD = f"""Thread 0x00007f01 (most recent call first):
  File "{OWN}rewards/process.py", line 12 in score

Current thread 0x00007f02 (most recent call first):
  File "/site-packages/ray/_private/worker.py", line 1000 in main_loop
"""
ENGINE = """Current thread 0x00007f02 (most recent call first):
  File "/lib/python3.11/queue.py", line 171 in get
  File "/site-packages/vllm/v1/engine/core.py", line 900 in run_busy_loop
"""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (COLLECTIVE, "in all_reduce (learner.py:143 _gradient)"),
        (IN_ANOTHER_THREAD, "in score (process.py:12)"),
        (ENGINE, "in get (core.py:900 run_busy_loop)"),
        (IN_ANOTHER_THREAD.split("\n\n")[1], "idle"),
        ("", "idle"),
    ],
)
def test_the_place_is_the_innermost_function_and_our_line_that_leads_there(text, shown):
    assert place(text) == shown

"""What processes are doing, asked from outside: real processes that compute, wait, are stopped, or do not respond."""

import os
import re
import signal
import socket
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
IN_A_THREAD = f"""import threading
def compute():
    {WITH_THE_GIL}
threading.Thread(target=compute, daemon=True).start()
{IN_A_LIBRARY}"""
ASLEEP_WITH_THE_GIL = "import ctypes\nwhile True: ctypes.PyDLL(None).sleep(60)"
HANDLER = "import os, signal\nsignal.signal(signal.SIGUSR1, {})\n"


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


@pytest.fixture
def soon(monkeypatch) -> Callable[[float], None]:
    """Expect replies at once, from processes that computed for so many seconds: 0 unless it is called."""
    monkeypatch.setattr(stacks, "REPLY_SECONDS", 0.5)

    def starved(seconds: float) -> None:
        monkeypatch.setattr(stacks, "STARVED_SECONDS", seconds)

    starved(0.0)
    return starved


def named(log: str, pattern: str) -> re.Match:
    """The activity of a log once it has a pattern, which may take some requests if the cores are busy."""
    until = time.monotonic() + 20
    while not (match := re.search(pattern, activities([log])[log])):
        assert time.monotonic() < until, activities([log])
    return match


def test_a_process_that_waits_writes_the_stacks_of_all_threads_to_its_log_and_goes_on(start, tmp_path):
    waits = "threading.Thread(target=time.sleep, args=(60,), name='another', daemon=True).start()"
    pid, log = start(f"import threading, time\n{waits}\n{IN_A_LIBRARY}"), str(tmp_path / "train-0.log")
    (activity,) = activities([log]).values()
    assert re.search(rf"^python\S* \(pid {pid}\) in wait \(threading.py:\d+\)$", activity)
    written = Path(log).read_text()
    assert re.search(r'^Thread 0x\w+ MainThread \(.*\):\n  File ".+", line \d+ in wait$', written, re.MULTILINE)
    assert re.search(r"^Thread 0x\w+ another ", written, re.MULTILINE)
    assert activities([log]) == {log: activity}, "it was not disturbed"


@pytest.mark.parametrize(
    ("code", "function"),
    [
        pytest.param(WITH_THE_GIL, "<module>", id="computes", marks=pytest.mark.slow),
        pytest.param(ASLEEP_WITH_THE_GIL, "<module>", id="sleeps", marks=pytest.mark.slow),
        pytest.param(IN_A_THREAD, "compute", id="another thread"),
    ],
)
def test_a_process_whose_thread_keeps_the_gil_is_named_with_the_place_of_this_thread(
    start, soon, tmp_path, code, function
):
    pid, log = start(code), str(tmp_path / "train-0.log")
    for _ in range(2):  # it was not disturbed
        place = rf"\(pid {pid}\) in {function} \(<string>:\d"
        named(log, rf"{place}.*; no thread has run Python for 0.5 s, with \d\.\d s of CPU time: \w+ \(state [RS]")


def test_a_stopped_process_is_named_as_stopped(start, tmp_path):
    pid, log = start(IN_A_LIBRARY), str(tmp_path / "train-0.log")
    os.kill(pid, signal.SIGSTOP)
    named(log, rf"\(pid {pid}\) stopped \(state T")


def test_a_process_that_would_die_of_the_signal_gets_none(start, soon, tmp_path):
    log = str(tmp_path / "train-0.log")
    pid = start(HANDLER.format("signal.SIG_DFL") + WITH_THE_GIL)
    assert re.search(rf"\(pid {pid}\) no thread has run Python .* running \(state R\)$", activities([log])[log])
    os.kill(pid, 0)


def test_a_process_that_has_no_time_to_reply_gets_no_signal(start, soon, tmp_path):
    soon(60.0)
    log = str(tmp_path / "train-0.log")
    pid = start(WITH_THE_GIL)
    assert re.search(rf"\(pid {pid}\) no thread has run Python .* running \(state R\)$", activities([log])[log])
    assert Path(log).read_text() == "begins\n"


def test_nothing_is_sent_to_a_process_that_has_not_reported_its_start(tmp_path):
    log = tmp_path / "train-0.log"
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, "-c", "while True: pass"], stderr=output)
    try:
        assert activities([str(log)])[str(log)].endswith(f"(pid {process.pid}) running")
        assert process.poll() is None and not log.read_text()
    finally:
        process.kill()
        process.wait()


def test_a_process_that_dies_of_the_signal_is_named_as_such(start, soon, tmp_path):
    log = str(tmp_path / "train-0.log")
    pid = start(HANDLER.format("lambda *_: os.kill(os.getpid(), signal.SIGSEGV)") + ASLEEP_WITH_THE_GIL)
    assert stacks.death_note(log) == ""
    assert activities([log])[log].endswith(f"(pid {pid}) died within 1 s of the SIGUSR1 that requested its stack")
    assert "of the SIGUSR1 that requested its stack" in stacks.death_note(log), "for whoever notices the death"


@pytest.mark.slow
def test_a_library_that_keeps_the_gil_while_it_is_imported_is_named_and_its_import_goes_on(start, soon, tmp_path):
    keeps = "until = time.monotonic() + 3\nwhile time.monotonic() < until: ctypes.PyDLL(None).usleep(3000000)"
    (tmp_path / "slow_library.py").write_text(f"import ctypes, time\n{keeps}")
    code = f"sys.path.append({str(tmp_path)!r})\nimport slow_library\nprint('imported', flush=True)\n{IN_A_LIBRARY}"
    pid, log = start(code), str(tmp_path / "train-0.log")
    named(log, rf"\(pid {pid}\) in <module> \(slow_library.py:3\); no thread has run Python")
    named(log, rf"\(pid {pid}\) in wait \(threading.py:\d+\)$")
    assert "imported" in Path(log).read_text()


@pytest.mark.slow
def test_a_process_whose_threads_import_survives_requests_under_full_load():
    """A small version of the measurement: a process whose handler walks the frames of running threads does not."""
    command = [sys.executable, "scripts/benchmark/stacks.py", "--requests", "500", "--signals", "100"]
    top = Path(__file__).parents[2]
    ended = subprocess.run(command, cwd=top, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(top)})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "500 requests: 0 processes died, 500 replies" in ended.stdout


def test_another_program_at_the_address_of_a_process_is_not_believed(tmp_path):
    log = tmp_path / "train-0.log"
    with log.open("w") as output, subprocess.Popen(["sleep", "60"], stderr=output) as process:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(stacks.address_of(process.pid))
            listener.listen()
            assert stacks.request(process.pid) is None
        process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_gets_no_stacks(start):
    pid = start(IN_A_LIBRARY)
    code = f"import os; from hybridrl.runtime import stacks; os.setuid(65534); print(stacks.request({pid}))"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert asked.stdout == "None\n", asked.stderr
    assert stacks.request(pid)


def test_stacks_are_printed_for_a_person_who_asks(start):
    pid = start(IN_A_LIBRARY)
    command = [sys.executable, "-m", "hybridrl.runtime.stacks"]
    printed = subprocess.run([*command, str(pid)], capture_output=True, text=True).stdout
    assert f"stacks of process {pid}" in printed and " in wait\n" in printed
    rejected = {"1": "process 1 is none of a run", "-1": "there is no process -1", "999999999": "there is no process"}
    for other, cause in rejected.items():
        done = subprocess.run([*command, "--", other], capture_output=True, text=True)
        assert done.returncode == 2 and cause in done.stderr and not done.stdout


def test_every_process_that_writes_to_a_log_is_named_and_one_that_only_helps_is_not(start, soon, tmp_path):
    helper = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    first = start(f"import subprocess\n{helper}\n{IN_A_LIBRARY}")
    second = start(WITH_THE_GIL)
    (activity,) = activities([str(tmp_path / "train-0.log")]).values()
    assert re.findall(r"\((pid \d+)\)", activity) == [f"pid {first}", f"pid {second}"]


def test_a_log_without_a_process_is_left_out(tmp_path):
    assert activities([str(tmp_path / "train-1.log")]) == {}


def test_two_processes_that_write_the_same_line_keep_it_in_both_logs(start, tmp_path):
    logs = [tmp_path / f"train-{rank}.log" for rank in (0, 1)]
    for log in logs:
        start("print('the same line', flush=True)", log)
        assert log.read_text() == "begins\nthe same line\n"


OWN = stacks.OWN[0]
COLLECTIVE = f"""
Thread 0x7f02 MainThread (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 3123 in all_reduce
  File "/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "{OWN}training/learner.py", line 143 in _gradient
  File "{OWN}training/worker.py", line 205 in update_policy
  File "/site-packages/ray/_private/worker.py", line 1000 in main_loop
Thread 0x7f01 reader (most recent call first):
  File "/lib/python3.11/threading.py", line 324 in wait
  File "/lib/python3.11/threading.py", line 1002 in _bootstrap
"""
WAITS_FOR_CALLS = """Thread 0x7f02 MainThread (most recent call first):
  File "/site-packages/ray/_private/worker.py", line 1000 in main_loop
"""
IN_ANOTHER_THREAD = f"""{WAITS_FOR_CALLS}Thread 0x7f01 scorer (most recent call first):
  File "{OWN}rewards/process.py", line 12 in score
"""
ENGINE = """Stack (most recent call first):
  File "/lib/python3.11/queue.py", line 171 in get
  File "/site-packages/vllm/v1/engine/core.py", line 900 in run_busy_loop
"""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (COLLECTIVE, "in all_reduce (learner.py:143 _gradient)"),
        (IN_ANOTHER_THREAD, "in score (process.py:12)"),
        (ENGINE, "in get (core.py:900 run_busy_loop)"),
        (WAITS_FOR_CALLS, "idle"),
        ("", "idle"),
    ],
)
def test_the_place_is_the_innermost_function_and_our_line_that_leads_there(text, shown):
    assert place(text) == shown


def test_a_stopped_process_that_writes_to_a_log_is_killed_and_no_other(start, tmp_path):
    pid, other = start("time.sleep(60)"), start("time.sleep(60)", tmp_path / "train-1.log")
    os.kill(pid, signal.SIGSTOP)
    stacks.kill_writers(str(tmp_path / "train-0.log"))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert os.waitpid(other, os.WNOHANG) == (0, 0), "it runs"

"""A guarded run as its shell, a scheduler and a killer see it; its work stands in for a driver that has started Ray."""

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

# A stand-in for Ray is in its own process group; one for a rollout server works in the run's directory and has another.
SERVER = """
import os, time
from pathlib import Path
from hybridrl.runtime.keeper import work_in_private
work_in_private()
Path("work").write_text(os.environ["TMPDIR"])
os.rename("work", "server")
time.sleep(60)
"""
WORK = f"""
import os, subprocess, sys, time
from pathlib import Path
from hybridrl.runtime.guard import guarded
from hybridrl.runtime.keeper import PrivateDirectory
from hybridrl.runtime.signals import StopRequest

def work():
    directory = PrivateDirectory()
    ray = subprocess.Popen(["sleep", "60"])
    server = [sys.executable, "-c", {SERVER!r}]
    server = subprocess.Popen(server, env=os.environ | directory.environment, start_new_session=True)
    while not Path("server").exists():
        time.sleep(0.01)
    Path("work").write_text(f"{{directory.path}} {{ray.pid}} {{server.pid}}")
    os.rename("work", "started")
    with StopRequest(wait_for_step=True) as stop:
        while not stop.reason:
            time.sleep(0.01)
        time.sleep(0.1)  # the step ends
        Path("saved").write_text(f"{{stop.reason}}, Ray is {{'dead' if ray.poll() else 'alive'}}")
    ray.kill()
    directory.close()
    return 7

sys.exit(guarded(work))
"""


class Guarded:
    def __init__(self, place: Path, **options: object) -> None:
        self.place = place
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | options
        self.process = subprocess.Popen([sys.executable, "-c", WORK], cwd=place, start_new_session=True, **output)
        until((place / "started").exists)
        directory, *pids = (place / "started").read_text().split()
        self.directories = [Path(directory), Path((place / "server").read_text())]
        self.server = psutil.Process(int(pids[1]))
        self.all = psutil.Process(self.process.pid).children(recursive=True)
        self.driver = min(psutil.Process(self.process.pid).children(), key=psutil.Process.create_time)

    def signal_group(self, number: int) -> None:
        """As a terminal does, `timeout`, which signals its child first, and some schedulers."""
        os.kill(self.process.pid, number)
        os.killpg(self.process.pid, number)

    def is_gone(self, processes: list[psutil.Process] | None = None) -> bool:
        processes = self.all if processes is None else processes
        return not any(map(Path.exists, self.directories)) and all(map(has_ended, processes))


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def start(tmp_path, monkeypatch) -> Iterator[Callable[..., Guarded]]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    runs = []

    def begin(**options: object) -> Guarded:
        runs.append(Guarded(tmp_path, **options))
        return runs[-1]

    yield begin
    for run in runs:
        for process in run.all:
            if process.is_running():
                process.kill()
        run.process.kill()


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP"), (signal.SIGINT, "Ctrl-C")]
)
def test_a_signal_to_the_group_is_one_request_to_stop_and_leaves_ray_alive_to_save(start, number, name):
    run = start()
    run.signal_group(number)
    assert run.process.wait(10) == 7
    assert (run.place / "saved").read_text() == f"{name}, Ray is alive"
    assert run.is_gone()


def test_nohup_keeps_a_run_from_hearing_of_its_terminals_end(start):
    run = start(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    run.signal_group(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        run.process.wait(0.5)
    run.signal_group(signal.SIGTERM)
    assert run.process.wait(10) == 7


def test_a_run_whose_terminal_is_gone_still_saves(start):
    ours, theirs = pty.openpty()
    run = start(stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.close(ours)
    run.signal_group(signal.SIGHUP)
    assert run.process.wait(10) == 7
    assert (run.place / "saved").exists()


def test_where_the_driver_is_killed_nothing_is_left_when_the_guard_says_so(start):
    run = start()
    run.driver.kill()
    output, _ = run.process.communicate(timeout=10)
    assert run.process.returncode == 137
    assert b"the driver was killed (signal 9" in output
    assert run.is_gone()


def test_where_guard_and_driver_are_killed_together_nothing_is_left_that_works_in_the_directory(start):
    run = start()
    run.process.kill()
    run.driver.kill()
    run.process.wait()
    until(lambda: run.is_gone([run.server]))


def test_what_is_left_where_the_keeper_is_killed_too_goes_when_the_next_run_starts(start, tmp_path):
    run = start()
    for process in {run.process, *run.all} - {run.server}:
        process.kill()
    run.process.wait()
    assert all(map(Path.exists, run.directories)) and not has_ended(run.server)
    (tmp_path / "next").mkdir()
    after = Guarded(tmp_path / "next")
    until(lambda: run.is_gone([run.server]))
    assert after.directories[0].exists()
    after.signal_group(signal.SIGTERM)
    assert after.process.wait(10) == 7


def test_nobody_else_may_enter_the_directory(start):
    assert start().directories[0].stat().st_mode & 0o777 == 0o700

"""A guarded run under signals and kills; its work stands in for a driver that has started Ray."""

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

from hybridrl.runtime import guard

# `sleep` stands in for Ray, in the session of the driver, and SERVER for a rollout server, in a session of its own.
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
from hybridrl.runtime.guard import StopRequest

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


TOP = Path(__file__).parents[2]


class Guarded:
    def __init__(self, directory: Path, **options: object) -> None:
        self.directory = directory
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | options
        self.process = subprocess.Popen([sys.executable, "-c", WORK], cwd=directory, start_new_session=True, **output)
        until((directory / "started").exists)
        private, *pids = (directory / "started").read_text().split()
        self.directories = [Path(private), Path((directory / "server").read_text())]
        self.server = psutil.Process(int(pids[1]))
        self.all = psutil.Process(self.process.pid).children(recursive=True)
        self.driver = min(psutil.Process(self.process.pid).children(), key=psutil.Process.create_time)

    def signal_group(self, number: int) -> None:
        """Send a signal as a terminal, some schedulers, and `timeout` do, which signals its child first."""
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
    monkeypatch.setenv("PYTHONPATH", str(TOP))
    runs = []

    def begin(directory: Path = tmp_path, **options: object) -> Guarded:
        runs.append(Guarded(directory, **options))
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
def test_a_signal_to_the_group_is_one_stop_request_and_does_not_end_ray(start, number, name):
    run = start()
    run.signal_group(number)
    assert run.process.wait(10) == 7
    assert (run.directory / "saved").read_text() == f"{name}, Ray is alive"
    assert run.is_gone()


def test_under_nohup_a_run_ignores_the_end_of_its_terminal(start):
    run = start(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    run.signal_group(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        run.process.wait(0.5)
    run.signal_group(signal.SIGTERM)
    assert run.process.wait(10) == 7


def test_a_run_without_its_terminal_still_saves(start):
    terminal, output = pty.openpty()
    run = start(stdout=output, stderr=output)
    os.close(output)
    os.close(terminal)
    run.signal_group(signal.SIGHUP)
    assert run.process.wait(10) == 7
    assert (run.directory / "saved").exists()


def test_after_a_kill_of_the_driver_the_guard_ends_everything(start):
    run = start()
    run.driver.kill()
    output, _ = run.process.communicate(timeout=10)
    assert run.process.returncode == 137
    assert b"the driver was killed (signal 9" in output
    assert run.is_gone()


def test_of_two_runs_side_by_side_a_guard_ends_only_its_own(start, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    killed, other = start(tmp_path / "a"), start(tmp_path / "b")
    killed.driver.kill()
    assert killed.process.wait(10) == 137 and killed.is_gone()
    assert not any(map(has_ended, other.all)) and all(map(Path.exists, other.directories))
    other.signal_group(signal.SIGTERM)
    assert other.process.wait(10) == 7 and other.is_gone()


def test_after_a_kill_of_guard_and_driver_the_keeper_ends_everything_in_the_directory(start):
    run = start()
    run.process.kill()
    run.driver.kill()
    run.process.wait()
    until(lambda: run.is_gone([run.server]))


def test_after_a_kill_of_the_keeper_too_the_next_run_cleans_up(start, tmp_path):
    run = start()
    killed = [process for process in run.all if process != run.server] + [psutil.Process(run.process.pid)]
    for process in killed:
        process.suspend()  # or the keeper would act on the end of another
    for process in killed:
        process.kill()
    run.process.wait()
    assert all(map(Path.exists, run.directories)) and not has_ended(run.server)
    (tmp_path / "next").mkdir()
    after = Guarded(tmp_path / "next")
    until(lambda: run.is_gone([run.server]))
    assert after.directories[0].exists()
    after.signal_group(signal.SIGTERM)
    assert after.process.wait(10) == 7


def test_equal_lines_of_two_actors_stand_in_the_log_of_each(tmp_path):
    code = "import sys; from hybridrl.runtime.guard import begin_actor; begin_actor(sys.argv[1]); print('loss is nan')"
    logs = [tmp_path / "train-0.log", tmp_path / "train-1.log"]
    for log in logs:
        subprocess.run([sys.executable, "-c", f"{code}; print('loss is nan')", str(log)], check=True, cwd=TOP)
    assert [log.read_text() for log in logs] == ["loss is nan\n" * 2] * 2


def test_other_users_may_not_enter_the_directory(start):
    assert start().directories[0].stat().st_mode & 0o777 == 0o700


def count_kills(patch: pytest.MonkeyPatch, file: Path, before: int) -> Callable[[str], int]:
    """Set the counts of the kernel by a file; when the run began it had counted so many kills for lack of memory."""
    patch.setattr(guard, "KERNEL_COUNTS", file)
    patch.setattr(guard, "OOM_KILLS_BEFORE", before)
    return file.write_text


@pytest.fixture
def counts(tmp_path, monkeypatch) -> Callable[[str], int]:
    return count_kills(monkeypatch, tmp_path / "vmstat", before=2)


EITHER = "by hand, or by the kernel for lack of memory"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("pgfault 9\noom_kill 5\n", "by the kernel for lack of memory: it has killed 3"),
        ("oom_kill 2\n", "by hand or by a scheduler"),
        ("", EITHER),
        ("pgfault 9\n", EITHER),
    ],
    ids=["it killed some since", "it killed none since", "no counts", "other counts"],
)
def test_kills_by_the_kernel_since_the_run_began_are_the_cause_if_it_counts_them(counts, text, cause):
    counts(text)
    assert cause in guard.kill_cause()
    guard.KERNEL_COUNTS.unlink()
    assert EITHER in guard.kill_cause()


@pytest.mark.parametrize(
    ("work", "status", "said"),
    [
        ("os._exit(1)", 1, "exit status 1"),  # as Ray's library does
        ("os.abort()", 128 + 6, "SIGABRT"),
        ("sys.exit(2)", 2, ""),
        ("raise OSError", 1, ""),
        ("return 1", 1, ""),
        ("os._exit(0)", 0, ""),
        ("os.kill(os.getpid(), 15)", 128 + 15, ""),  # a scheduler's
        ("import signal; signal.signal(13, signal.SIG_DFL); os.kill(os.getpid(), 13)", 128 + 13, ""),  # of `| head`
    ],
)
def test_a_driver_that_a_library_ended_without_a_message_has_one(work, status, said):
    code = (
        f"import os, sys\nfrom hybridrl.runtime.guard import guarded\ndef work():\n    {work}\nsys.exit(guarded(work))"
    )
    variables = os.environ | {"RAY_memory_usage_threshold": "most"}
    done = subprocess.run([sys.executable, "-c", code], cwd=TOP, capture_output=True, text=True, env=variables)
    assert done.returncode == status
    message = f"failed: a library ended the driver without a message ({said})"
    assert message in done.stdout if said else "failed" not in done.stdout
    assert ("cannot read in its variables ends it, too: RAY_memory_usage_threshold=most" in done.stdout) == bool(said)


@pytest.mark.parametrize(("allowed", "status", "starts"), [(0, 3, 1), (1, 3, 2), (2, 0, 3), (9, 0, 3)])
def test_a_driver_that_a_library_ends_is_started_again_as_often_as_it_may(tmp_path, allowed, status, starts):
    code = f"""
import os, sys
from pathlib import Path
from hybridrl.runtime import guard
def work():
    guard.may_restart(guard.before.restarts_left if guard.before else {allowed})
    started = Path({str(tmp_path / "starts")!r})
    with started.open("a") as file:
        file.write("x")
    if started.stat().st_size < 3:
        os._exit(3)
sys.exit(guard.guarded(work))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=TOP, capture_output=True, text=True)
    assert done.returncode == status
    assert (tmp_path / "starts").read_text() == "x" * starts
    assert done.stdout.count("starting it again from the last checkpoint") == starts - 1


@pytest.mark.parametrize("delay", [0, 1], ids=["at once", "before the guard runs again"])
def test_a_driver_that_is_started_again_gets_the_signals_that_its_guard_gets(tmp_path, delay):
    code = f"""
import os, signal, sys, time
from pathlib import Path
from hybridrl.runtime import guard
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # whatever it inherits
fork = os.fork
def slow():
    child = fork()
    time.sleep({delay} if child else 0)
    return child
os.fork = slow
def work():
    guard.may_restart(1)
    if guard.before is None:
        os._exit(3)
    try:
        Path({str(tmp_path / "started")!r}).touch()
        time.sleep(60)
    except KeyboardInterrupt:
        return 7
sys.exit(guard.guarded(work))
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=TOP, start_new_session=True)
    until((tmp_path / "started").exists)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 7

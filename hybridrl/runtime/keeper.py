"""A private directory in /tmp, and a process that removes it and every process using it when its owner ends.

The owner may be killed together with its guard, so the keeper is a separate process in its own session:
`python keeper.py DIRECTORY PID LOCK`. Processes that use the directory are recognized by their TMPDIR. The keeper
imports only the standard library, to start quickly and use little memory.
"""

import contextlib
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT, PREFIX = Path("/tmp"), "hybridrl-"  # independent of TMPDIR: Ray's sockets need a short path
LOCK = "lock"  # held by the owner and the keeper: if it is free, both are gone
END_SECONDS = 30.0  # for killed processes to disappear
STARTING = 1000  # milliseconds: the longest wait for the environment of a new program
OPEN: list["PrivateDirectory"] = []  # kept open until this process ends


class PrivateDirectory:
    """A directory that no other user may enter, removed by `close` or when this process ends."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix=PREFIX, dir=ROOT)
        # The file gets its name only after it is locked, so that no other keeper finds it unlocked.
        unnamed = Path(self.path, "new")
        self._lock = os.open(unnamed, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(Path(self.path, LOCK))
        command = [sys.executable, "-IS", __file__, self.path, str(os.getpid()), str(self._lock)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        environment = os.environ | {"TMPDIR": ""}  # or the keeper of this process's TMPDIR would end the new one
        # The launched process forks the keeper and ends. The keeper ends when its input is closed.
        launched = subprocess.Popen(command, env=environment, pass_fds=[self._lock], start_new_session=True, **pipes)
        launched.wait()
        assert launched.stdin is not None and launched.stdout is not None
        self._input, self._output = launched.stdin, launched.stdout

    @property
    def environment(self) -> dict[str, str]:
        """Variables of processes that use the directory; SPT_NOENV keeps them readable if a process sets its title."""
        return {"TMPDIR": self.path, "SPT_NOENV": "1"}

    def close(self) -> None:
        """End all processes that use the directory, and remove it."""
        self._input.close()
        self._output.read()
        self._output.close()
        os.close(self._lock)


def work_in_private() -> None:
    """From now on, remove this process's temporary files, and end its new children, when it ends."""
    OPEN.append(PrivateDirectory())
    os.environ.update(OPEN[-1].environment)
    tempfile.tempdir = None  # computed again from TMPDIR


def is_keeper(command: list[str]) -> bool:
    return __file__ in command


def keep(directory: Path, owner: int) -> None:
    """Wait for the owner's end, then clean up; first clean up the directories of killed owners and keepers."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for left in abandoned():
        clear(left)
    watched = [sys.stdin.fileno()]  # closed by the owner, or with the last process that the owner forked
    with contextlib.suppress(OSError, AttributeError):  # an old kernel, or the owner has ended
        watched.append(os.pidfd_open(owner))
    select.select(watched, [], [])
    clear(directory)


def working_in(directory: Path) -> list[int]:
    """Return the processes that were started with this TMPDIR."""
    return started_with(f"TMPDIR={directory}")


def started_with(assignment: str) -> list[int]:
    """Return the processes that were started with this variable, such as NAME=value."""
    variable, pids = os.fsencode(assignment), []
    for process in Path("/proc").glob("[0-9]*"):  # not */environ: glob fails if one ends before it looks for that
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if variable in _environment(process).split(b"\0"):
                pids.append(int(process.name))
    return pids


def _environment(process: Path) -> bytes:
    """Return the environment that a process was started with. The kernel sets the environment of a program after the
    call that started it has returned: until then the end of it (field 51 of `stat`) is 0, as of the kernel's threads,
    which have no executable."""
    for _ in range(STARTING):
        ends = (process / "stat").read_bytes().rpartition(b")")[2].split()[48]
        if ends != b"0" or not os.path.exists(process / "exe"):
            break
        time.sleep(0.001)
    return (process / "environ").read_bytes()


def abandoned() -> Iterator[Path]:
    """Yield the directories of this user whose owner and keeper are gone, each locked meanwhile."""
    for lock in ROOT.glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError), lock.open("rb+") as file:
            if os.fstat(file.fileno()).st_uid == os.getuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield lock.parent


def clear(directory: Path) -> None:
    """End the processes that use a directory, and remove it."""
    deadline = time.monotonic() + END_SECONDS
    while directory.exists() and time.monotonic() < deadline:
        pids = working_in(directory)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if pids:
            time.sleep(0.02)
        else:  # repeated if a dying thread has created a file meanwhile
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    if os.fork() == 0:
        keep(Path(sys.argv[1]), int(sys.argv[2]))

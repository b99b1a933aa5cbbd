"""A private directory in /tmp, and a process that removes it, with every process that works there, when its owner ends.

The owner may be killed together with whatever watches over it, so that process is one of its own, in its own session:
`python keeper.py DIRECTORY PID LOCK`. What works in the directory is known by its TMPDIR. Only the standard library is
imported, so that it starts in no time and takes little memory.
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

PLACE, PREFIX = Path("/tmp"), "hybridrl-"  # whatever TMPDIR says: Ray's sockets need a short path
LOCK = "lock"  # held by the owner and the keeper: where it is free, both are gone
END_SECONDS = 30.0  # for processes that were killed to be gone
OPEN: list["PrivateDirectory"] = []  # until this process ends


class PrivateDirectory:
    """A directory that nobody else may enter, removed by `close` or when this process ends, whichever comes first."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix=PREFIX, dir=PLACE)
        self._lock = _locked(Path(self.path))
        command = [sys.executable, "-IS", __file__, self.path, str(os.getpid()), str(self._lock)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        elsewhere = os.environ | {"TMPDIR": ""}  # the keeper of the directory where its owner works must not end it
        # What is launched leaves the keeper behind, which ends when its input does, and its output with it.
        launched = subprocess.Popen(command, env=elsewhere, pass_fds=[self._lock], start_new_session=True, **pipes)
        launched.wait()
        self._input, self._output = launched.stdin, launched.stdout

    @property
    def environment(self) -> dict[str, str]:
        """Variables of processes that are to work here; with SPT_NOENV a process that sets its title keeps them."""
        return {"TMPDIR": self.path, "SPT_NOENV": "1"}

    def close(self) -> None:
        """End what still works here, and remove it."""
        self._input.close()
        self._output.read()
        self._output.close()
        os.close(self._lock)


def work_in_private() -> None:
    """Have this process's temporary files removed, and the children that it starts from now on ended, when it ends."""
    OPEN.append(PrivateDirectory())
    os.environ.update(OPEN[-1].environment)
    tempfile.tempdir = None  # it is found again


def is_keeper(command: list[str]) -> bool:
    return __file__ in command


def keep(directory: Path, owner: int) -> None:
    """Wait for the owner's end, then clear up; first what others have left whose keeper was killed too."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for left in _abandoned():
        _clear(left)
    watched = [sys.stdin.fileno()]  # it is closed by the owner, or with the last process that the owner has forked
    with contextlib.suppress(OSError, AttributeError):  # on an old kernel, and where the owner has ended already
        watched.append(os.pidfd_open(owner))
    select.select(watched, [], [])
    _clear(directory)


def working_in(directory: Path) -> list[int]:
    """The processes that were started with this TMPDIR."""
    mark, found = os.fsencode(f"TMPDIR={directory}"), []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if mark in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
    return found


def _clear(directory: Path) -> None:
    deadline = time.monotonic() + END_SECONDS
    while directory.exists() and time.monotonic() < deadline:
        found = working_in(directory)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if found:
            time.sleep(0.02)
        else:  # again, where a thread that was not yet dead has made a file meanwhile
            shutil.rmtree(directory, ignore_errors=True)


def _locked(directory: Path) -> int:
    """An open file with a lock on it, which has its name only once it is locked."""
    new = directory / "new"
    descriptor = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    new.rename(directory / LOCK)
    return descriptor


def _abandoned() -> Iterator[Path]:
    """This user's directories whose lock nobody holds."""
    for lock in PLACE.glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError), lock.open("rb+") as file:
            if os.fstat(file.fileno()).st_uid == os.getuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield lock.parent


if __name__ == "__main__":
    if os.fork() == 0:
        keep(Path(sys.argv[1]), int(sys.argv[2]))

"""A run in a process of its own, and a parent that clears up after it: however a run ends, nothing of it stays behind.

Ray ends its processes with the driver in the ordinary cases. Where the driver is killed outright, some would live for
minutes; the parent adopts every process that its own children leave behind, and ends it. Where the parent is killed
too, `keeper.py` does that for Ray's processes.

The run is in a session of its own: a signal to the parent's process group, as a terminal or `timeout` sends it, must
not end Ray, without which the step could not be saved. The parent passes the signal to the driver alone.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable

import psutil

from hybridrl.runtime.keeper import END_SECONDS, is_keeper
from hybridrl.runtime.oom import killer

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
EXIT_KILLED = 128 + signal.SIGKILL
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def guarded(work: Callable[[], int]) -> int:
    """Run `work` in a child process and return its exit status, with every process it started gone."""
    if sys.platform != "linux":
        return work()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    guard, child = os.getpid(), os.fork()
    if child == 0:
        end_with_parent(guard, signal.SIGTERM)
        os.setsid()
        return work()
    for number in PASSED_ON:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup has it ignored
            signal.signal(number, lambda number, _: _send(child, number))
    status = _wait_for(child)
    _end_orphans()
    if status == -signal.SIGKILL:
        print(
            f"failed the driver was killed (signal 9, {killer()}); everything it had started is stopped",
            flush=True,
        )
        return EXIT_KILLED
    return status if status >= 0 else 128 - status


def end_with_parent(parent: int, how: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends, however that happens."""
    _prctl(PR_SET_PDEATHSIG, how)
    if os.getppid() != parent:
        os.kill(os.getpid(), how)


def begin_actor(log_file: str) -> None:
    """Have an actor end with the Ray of its machine, which it does not see end while it waits in a collective, and send
    all that it, its libraries and its children print to a file."""
    end_with_parent(os.getppid(), signal.SIGKILL)
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _send(child: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.kill(child, number)


def _end_orphans() -> None:
    """End what the child has left; a keeper ends when it has cleared up."""
    keepers = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            keepers.append(process) if is_keeper(process.cmdline()) else process.kill()
    psutil.wait_procs(keepers, timeout=END_SECONDS)


def _wait_for(child: int) -> int:
    """The child's exit status, negative for a signal; adopted orphans are reaped on the way."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value)

"""A run in a process of its own, and a parent that clears up after it: however a run ends, nothing of it stays behind.

Ray ends its processes with the driver in the ordinary cases. Where the driver is killed outright, some would go on for
minutes; the parent is told of every process that its own children leave behind, and ends it.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

import psutil

from hybridrl.out_of_memory import killer

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
EXIT_KILLED = 128 + signal.SIGKILL


def guarded(work: Callable[[], int]) -> int:
    """Run `work` in a child process and return its exit status, with every process it started gone."""
    if sys.platform != "linux":
        return work()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    guard, child = os.getpid(), os.fork()
    if child == 0:
        end_with_parent(guard, signal.SIGTERM)
        return work()
    # The terminal's Ctrl-C reaches the child by itself; what only this process is sent is handed on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    status = _wait_for(child)
    for process in psutil.Process().children(recursive=True):
        process.kill()
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


def redirect_output(log_file: str) -> None:
    """Send all that this process, its libraries and its children print to a file."""
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _wait_for(child: int) -> int:
    """The child's exit status, negative for a signal; adopted orphans are reaped on the way."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value)

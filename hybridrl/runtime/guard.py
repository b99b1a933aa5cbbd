"""Runs a command in a child process and cleans up after it: however a run ends, it leaves no process behind. And stop
requests: the first Ctrl-C, SIGTERM or SIGHUP stops after the step is saved, the second stops at once.

Ray normally ends its processes with the driver. If the driver is killed, some would live for minutes: the parent adopts
every process that its child leaves behind, and ends it. If the parent is killed too, `keeper.py` does so for Ray's.
The run has its own session: a signal to the parent's process group, as sent by a terminal or `timeout`, must not end
Ray, which is needed to save the step. The parent passes the signal to the driver only.
"""

import contextlib
import ctypes
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self

import psutil

from hybridrl.runtime import EXIT_KILLED
from hybridrl.runtime.environment import replace_unwritable_home
from hybridrl.runtime.keeper import END_SECONDS, is_keeper
from hybridrl.runtime.stacks import REQUEST, write_stacks_on_request
from hybridrl.tracking.console import info, print_text
from hybridrl.tracking.faults import BEGINS, REQUESTED, record

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOG_BYTES = 64 << 20  # in a log of custom code
KERNEL_COUNTS = Path("/proc/vmstat")
ENDED = b"."  # from a driver that has ended by itself, with or without an exception
ENDED_BY_LIBRARY = (
    "a library ended the driver without a message ({}), as Ray does at some calls once its raylet is lost; all its "
    "processes are stopped"
)
CONTINUES = "the same command continues from the last checkpoint"


class Before(NamedTuple):
    """The end of the previous driver, whose work this one continues, and the number of restarts left."""

    ended: str
    restarts_left: int


before: Before | None = None
_to_guard: int | None = None  # in a driver: its end of a pipe


def guarded(work: Callable[[], int]) -> int:
    """Run `work` in a child process and return its exit status after ending every process it started. A child that a
    library ended is started again as often as `may_restart` said."""
    global before
    if directory := replace_unwritable_home():
        print_text(f"the home directory cannot be written, so caches are in {directory}", error=True)
    if sys.platform != "linux":
        return work()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    handlers = {number: signal.getsignal(number) for number in (*FORWARDED, REQUEST)}
    while True:
        guard = _Guard(handlers)
        if guard.child == 0:
            return guard.run(work)
        status, said = guard.wait(), guard.said()
        if status == -signal.SIGKILL:
            how = f"signal 9, {kill_cause()}"
            print(f"failed: the driver was killed ({how}); all its processes are stopped", flush=True)
            return EXIT_KILLED
        code = status if status >= 0 else 128 - status
        if status == 0 or -status in (*FORWARDED, signal.SIGPIPE) or ENDED in said:
            return code
        how = f"exit status {status}" if status > 0 else signal.Signals(-status).name
        ended, left = ENDED_BY_LIBRARY.format(how), int(said[-1]) if said else 0
        # Not RAY_AUTH_TOKEN, a secret: what Ray reads as numbers has small letters.
        numbers = [f"{name}={value}" for name, value in os.environ.items() if name[:4] == "RAY_" and name[4:].islower()]
        if numbers:
            ended += f"; a number that Ray cannot read in its variables ends it, too: {' '.join(numbers)}"
        if not left or guard.signalled:
            print(f"failed: {ended}, and {CONTINUES}", flush=True)
            return code
        before = Before(ended, left - 1)
        print(f"{ended}; starting it again from the last checkpoint (restarts left: {left - 1})", flush=True)


class _Guard:
    """A driver in a process of its own, from both sides."""

    def __init__(self, handlers: Mapping[signal.Signals, Any]) -> None:
        self.reader, self.writer = os.pipe()
        self.signalled, guard = False, os.getpid()
        # One that came before `forward` is in place would be lost: to the driver that has ended, of one started again.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        self.child = os.fork()
        if self.child == 0:
            end_with_parent(guard, signal.SIGTERM)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return
        os.close(self.writer)
        for number, handler in handlers.items():
            if number != signal.SIGHUP or handler != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self.forward)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def run(self, work: Callable[[], int]) -> int:
        global _to_guard
        _to_guard = self.writer
        os.setsid()
        write_stacks_on_request()
        try:
            return work()
        finally:
            os.write(self.writer, ENDED + b"\n")

    def forward(self, number: int, _: object) -> None:
        self.signalled |= number in FORWARDED
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(self.child, number)

    def wait(self) -> int:
        """Wait for the end, and end every process that the driver leaves behind. Returns its status, negative for a
        signal."""
        pid, status = os.wait()
        while pid != self.child:  # an adopted orphan
            pid, status = os.wait()
        keepers = []  # these end by themselves after cleaning up
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                keepers.append(process) if is_keeper(process.cmdline()) else process.kill()
        psutil.wait_procs(keepers, timeout=END_SECONDS)
        return os.waitstatus_to_exitcode(status)

    def said(self) -> list[bytes]:
        """Return what the driver has written."""
        os.set_blocking(self.reader, False)
        with contextlib.suppress(BlockingIOError):  # a process that it had forked was killed a moment ago
            return os.read(self.reader, 1 << 16).splitlines()
        return []


def may_restart(left: int) -> None:
    """Say how often the guard may run this driver's work again if a library ends it; the work resumes by itself."""
    if _to_guard is not None:
        os.write(_to_guard, b"%d\n" % left)


def end_with_parent(parent: int, how: signal.Signals) -> None:
    """Make the kernel send this process a signal when its parent ends for any reason."""
    _prctl(PR_SET_PDEATHSIG, how)
    if os.getppid() != parent:
        os.kill(os.getpid(), how)


def begin_actor(log_file: str) -> None:
    """End this actor with the Ray of its machine: in a collective it would not notice that end. Redirect the output of
    its process and children to a file, and write its stacks there on request."""
    end_with_parent(os.getppid(), signal.SIGKILL)
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    if os.fstat(1).st_size:
        os.write(1, BEGINS.encode())
    write_stacks_on_request()


def bound_log(log_file: Path | None) -> None:
    """Remove the second half of a file beyond LOG_BYTES, to which others append: its beginning and end say most."""
    with contextlib.suppress(OSError):
        if log_file is not None and os.stat(log_file).st_size > LOG_BYTES:
            os.truncate(log_file, LOG_BYTES // 2)
            with open(log_file, "a", encoding="utf-8") as file:
                file.write(f"\n--- what was written here is removed: a log has at most {LOG_BYTES >> 20} MiB ---\n")


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value)


def oom_kills() -> int | None:
    """Return how many processes the kernel of this machine has killed when it was out of memory, or None if unknown."""
    try:
        counts = dict(line.split() for line in KERNEL_COUNTS.read_text().splitlines())
    except OSError:
        return None
    return int(counts["oom_kill"]) if "oom_kill" in counts else None


OOM_KILLS_BEFORE = oom_kills()  # when the run began


def kill_cause() -> str:
    """Return who probably killed a process of this machine with signal 9: "by hand ..." or "by the kernel ..."."""
    now = oom_kills()
    if now is None or OOM_KILLS_BEFORE is None:
        return "by hand, or by the kernel for lack of memory (see dmesg)"
    if now == OOM_KILLS_BEFORE:
        return "by hand or by a scheduler: the kernel has killed nothing here for lack of memory since the run began"
    killed = now - OOM_KILLS_BEFORE
    return f"by the kernel for lack of memory: it has killed {killed} of this machine's processes since the run began"


NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
# `timeout` and schedulers send one request twice: to the process that they started, and to its group.
SAME_REQUEST_SECONDS = 1.0


class Requests:
    """The stop requests that this process received; signals belong to a process, so there is one instance."""

    def __init__(self) -> None:
        self.last = ""
        self._time = 0.0

    def receive(self, number: int) -> bool:
        """Record a signal, and return whether it is a new request."""
        if number == signal.SIGHUP:
            # Writing to a terminal that is gone would fail, and with it the checkpoint of the step.
            for output in (1, 2):
                if stat.S_ISCHR(os.fstat(output).st_mode) and not os.isatty(output):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
        now = time.monotonic()
        new = not self.last or now - self._time >= SAME_REQUEST_SECONDS
        if new:
            self.last, self._time = NAMES[signal.Signals(number)], now
            record(REQUESTED, self.last)
        return new

    def raise_again(self) -> None:
        """Raise the request, if there was one: a library may have caught what it raised."""
        if self.last:
            raise KeyboardInterrupt(self.last)


REQUESTS = Requests()


def stop_at_once() -> None:
    """Raise KeyboardInterrupt at a signal, from now on."""
    REQUESTS.last = ""
    _install(_stop)


@contextmanager
def ended_by_closed_pipe() -> Iterator[None]:
    """End this process silently if it prints in the block and nobody reads it any more, as in `| head`.

    The handler is put back after it: elsewhere a closed connection must raise, not end the process.
    """
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        yield
        sys.stdout.flush()
    finally:
        signal.signal(signal.SIGPIPE, before)


def _install(handler: signal.Handlers) -> dict[signal.Signals, signal.Handlers]:
    """Install the handler and return the previous ones. SIGHUP stays ignored under `nohup`."""
    numbers = [number for number in NAMES if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in numbers}


def _stop(number: int, frame: FrameType | None) -> None:
    if REQUESTS.receive(number):
        REQUESTS.raise_again()


class StopRequest:
    """While it is open, `reason` names the first signal to stop, if there was one. Without `wait_for_step` a signal
    raises KeyboardInterrupt at once. One before it has ended the run already, unless a library has caught it."""

    def __init__(self, *, wait_for_step: bool) -> None:
        self.wait_for_step = wait_for_step
        self.reason = ""

    def __enter__(self) -> Self:
        REQUESTS.raise_again()
        self._previous = _install(self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.reason or not self.wait_for_step:
            _stop(number, frame)
        elif REQUESTS.receive(number):
            self.reason = REQUESTS.last
            info(f"{self.reason}: stopping after this step is saved; a second signal stops at once")

"""Graceful shutdown: the first Ctrl-C, SIGTERM or SIGHUP stops after the step is saved, the second stops at once."""

import os
import signal
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

from hybridrl.tracking.console import info
from hybridrl.tracking.faults import REQUESTED, record

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
    """Have a signal raise KeyboardInterrupt, from now on."""
    REQUESTS.last = ""
    _install(_stop)


@contextmanager
def ended_by_closed_pipe() -> Iterator[None]:
    """Have what is printed in the block end this process silently once nobody reads it, as in `| head`.

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

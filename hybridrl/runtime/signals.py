"""Being asked to stop: the first Ctrl-C, SIGTERM or SIGHUP lets the step end and be saved, the second stops at once."""

import os
import signal
import stat
import time
from types import FrameType, TracebackType
from typing import Self

from hybridrl.tracking.log import info

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
# `timeout` and schedulers make one request twice: to the process that they started, and to its group.
SAME_REQUEST_SECONDS = 1.0


class Requests:
    """What this process has been asked to stop by; signals belong to a process, so there is one of these."""

    def __init__(self) -> None:
        self.last = ""
        self._time = 0.0

    def note(self, number: int) -> bool:
        """Note a signal; returns whether it is a new request."""
        if number == signal.SIGHUP:
            _forget_lost_terminal()
        now = time.monotonic()
        new = not self.last or now - self._time >= SAME_REQUEST_SECONDS
        if new:
            self.last, self._time = NAMES[signal.Signals(number)], now
        return new


REQUESTS = Requests()


def _forget_lost_terminal() -> None:
    """To write to a terminal that is gone would fail, and with it the step's save."""
    for output in (1, 2):
        if stat.S_ISCHR(os.fstat(output).st_mode) and not os.isatty(output):
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)


def stop_at_once() -> None:
    """Have a signal raise KeyboardInterrupt, from now on."""
    REQUESTS.last = ""
    _handle_with(_stop)


def _handle_with(handler: signal.Handlers) -> dict[signal.Signals, signal.Handlers]:
    """The handlers that were there before. SIGHUP stays ignored where `nohup` has it so."""
    heard = [number for number in NAMES if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


def _stop(number: int, frame: FrameType | None) -> None:
    if REQUESTS.note(number):
        raise KeyboardInterrupt(REQUESTS.last)


class StopRequest:
    """While it is open, `reason` says how the run was asked to stop, if it was. Where there is nothing to wait for, a
    signal stops at once, by KeyboardInterrupt."""

    def __init__(self, *, wait_for_step: bool) -> None:
        self.wait_for_step = wait_for_step
        self.reason = ""

    def __enter__(self) -> Self:
        self._before = _handle_with(self._asked)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self.reason or not self.wait_for_step:
            _stop(number, frame)
        elif REQUESTS.note(number):
            self.reason = REQUESTS.last
            info(f"{self.reason}: the step is finished and saved first; once more stops at once")

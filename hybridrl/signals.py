"""Being asked to stop: the first Ctrl-C or SIGTERM lets the step end and be saved, the second stops at once."""

import signal
from types import FrameType, TracebackType
from typing import Self

from hybridrl.tracking.log import info

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class StopRequest:
    """While it is open, `reason` says how the run was asked to stop, if it was. Where there is nothing to wait for, a
    signal stops at once, by KeyboardInterrupt."""

    def __init__(self, *, wait_for_step: bool) -> None:
        self.wait_for_step = wait_for_step
        self.reason = ""

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._asked) for number in NAMES}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self.reason or not self.wait_for_step:
            raise KeyboardInterrupt(NAMES[signal.Signals(number)])
        self.reason = NAMES[signal.Signals(number)]
        info(f"{self.reason}: the step is finished and saved first; once more stops at once")

"""How far an evaluation is: a bar on a terminal, a line per minute in a log."""

import threading
import time
from datetime import timedelta
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hybridrl.evaluation.samples import Sample
from hybridrl.tracking.console import console, info, on_terminal

SECONDS = 60.0  # between two lines of a log


class EvaluationProgress:
    """Shows how many of `total` samples are finished; call it with each."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.tokens = total, 0, 0
        self.sum, self.scored = 0.0, 0
        self.began: float | None = None  # when the first sample finished
        self.bar: Progress | None = None
        self.ended = threading.Event()

    def __enter__(self) -> Self:
        if on_terminal():
            parts = (BarColumn(30), MofNCompleteColumn(), TextColumn("samples"), TimeElapsedColumn())
            left = (TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[now]}"))
            self.bar = Progress(*parts, *left, console=console, refresh_per_second=4)
            self.task = self.bar.add_task("", total=self.total, now="")
            self.bar.start()
        else:
            threading.Thread(target=self._log, daemon=True).start()
        return self

    def __call__(self, sample: Sample) -> None:
        self.began = self.began or time.monotonic()
        self.done, self.tokens = self.done + 1, self.tokens + sample.tokens
        if sample.value is not None:
            self.sum, self.scored = self.sum + sample.value, self.scored + 1
        if self.bar:
            self.bar.update(self.task, completed=self.done, now=self._now())

    def _log(self) -> None:
        while not self.ended.wait(SECONDS):
            info(f"{self.done}/{self.total} samples{self._now()}")

    def _now(self) -> str:
        """Return speed, time left and mean, as far as they are known."""
        seconds = time.monotonic() - self.began if self.began else 0.0
        text = f", mean so far {self.sum / self.scored:.3f}" if self.scored else ""
        if self.done < 2 or not seconds:
            return text
        left = timedelta(seconds=round(seconds / (self.done - 1) * (self.total - self.done)))
        return f", {self.tokens / seconds:,.0f} tokens/s{'' if self.bar else f', {left} left'}{text}"

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        if self.bar:
            self.bar.stop()

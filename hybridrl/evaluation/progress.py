"""How far an evaluation is: a bar on a terminal, a line per minute in a log."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hybridrl.evaluation.samples import Sample
from hybridrl.tracking.console import console, info, on_terminal

SECONDS = 60.0  # between two lines of a log


class EvaluationProgress:
    """Shows how many of `total` samples are finished; call it with each."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self.clock, self.done, self.tokens = total, clock, 0, 0
        self.right, self.scored = 0.0, 0
        self.began = self.last = clock()
        self.bar: Progress | None = None

    def __enter__(self) -> Self:
        if on_terminal():
            parts = (BarColumn(30), MofNCompleteColumn(), TextColumn("samples"), TimeElapsedColumn())
            left = (TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[now]}"))
            self.bar = Progress(*parts, *left, console=console, refresh_per_second=4)
            self.task = self.bar.add_task("", total=self.total, now="")
            self.bar.start()
        return self

    def __call__(self, sample: Sample) -> None:
        self.done, self.tokens = self.done + 1, self.tokens + sample.tokens
        if sample.value is not None:
            self.right, self.scored = self.right + sample.value, self.scored + 1
        now = self.clock()
        if self.bar:
            self.bar.update(self.task, completed=self.done, now=self._now(now))
        elif now - self.last >= SECONDS:
            self.last = now
            left = (now - self.began) / self.done * (self.total - self.done)
            info(f"{self.done}/{self.total} samples, {self._now(now)}, {timedelta(seconds=round(left))} left")

    def _now(self, now: float) -> str:
        mean = f", mean so far {self.right / self.scored:.3f}" if self.scored else ""
        return f"{self.tokens / max(now - self.began, 1e-9):,.0f} tokens/s{mean}"

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

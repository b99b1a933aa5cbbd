"""Measure rows one after another within a time limit, and print and write each as soon as it is complete."""

import signal
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

from side_by_side import HEAD, Row, line, write


class Report:
    """Rows, printed and written as soon as they are added."""

    def __init__(self, file: Path | None) -> None:
        self.file, self.rows = file, []
        print(HEAD, flush=True)

    def add(self, *rows: Row) -> None:
        for row in rows:
            self.rows.append(row)
            print(line(row), flush=True)
        if self.file is not None:
            write(self.rows, self.file)


def measure(tasks: Mapping[str, Callable[[], list[Row]]], report: Report, seconds: float) -> list[str]:
    """Run the tasks until the time is over; if the first fails, none of the others. Returns those that failed."""
    deadline, waiting, failed = time.monotonic() + seconds, dict(tasks), []
    # Only KeyboardInterrupt also interrupts Ray calls; the timer repeats it in case the first was swallowed.
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds, 5)
    try:
        for name, work in tasks.items():
            try:
                report.add(*work())
            except Exception as error:
                traceback.print_exc()
                report.add(Row(name, f"failed: {type(error).__name__}: {error}".splitlines()[0][:200], ""))
                failed.append(name)
            del waiting[name]
            if failed[:1] == list(tasks)[:1]:
                break
    except KeyboardInterrupt:
        if time.monotonic() < deadline:
            raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    report.add(*(Row(name, "not measured", "") for name in waiting))
    return failed


def cell(seconds: list[float]) -> str:
    return f"{1e3 * median(seconds):.1f} ms (least {1e3 * min(seconds):.1f})"

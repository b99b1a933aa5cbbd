"""Time two or more implementations in turn (A B A B ...) in one process tree, and write their table."""

import argparse
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

ROUNDS = 5
HEAD = "| what | hybridrl | compared with | value | target |\n|---|---|---|--:|---|"


@dataclass(frozen=True)
class Seconds:
    """Seconds of every round of a side: wall-clock time, and processor time of all processes."""

    wall: list[float]
    cpu: list[float]

    @property
    def least(self) -> float:
        return min(self.wall)

    @property
    def median(self) -> float:
        return median(self.wall)


@dataclass(frozen=True)
class Row:
    """A row of docs/benchmarks.md: what was measured, the figures as text, a value, and its target."""

    what: str
    ours: str
    other: str
    value: float | None = None  # what the target refers to: a speed-up, a share, a ratio of costs, milliseconds
    target: str = ""  # "at least 2 (aim 4)" or "at most 1.2 (aim 1.1)"

    @property
    def within(self) -> float | None:
        """How much better the value is than the target, which is met from 1 on; None without a value or a target."""
        kind, _, rest = self.target.partition(" ")[2].partition(" ")
        if self.value is None or kind not in ("least", "most"):
            return None
        target = float(rest.split()[0])
        return self.value / target if kind == "least" else target / self.value


def in_turn(sides: Mapping[str, Callable[[], object]], rounds: int = ROUNDS, warm_up: int = 1) -> dict[str, Seconds]:
    """Time each side once per round, one after another; warm-up rounds fill caches and are not counted."""
    seconds = {name: Seconds([], []) for name in sides}
    for number in range(-warm_up, rounds):
        for name, work in sides.items():
            gc.collect()
            cpu, wall = cpu_seconds(), time.perf_counter()
            work()
            wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
            if number >= 0:
                seconds[name].wall.append(wall)
                seconds[name].cpu.append(cpu)
    return seconds


def cpu_seconds() -> float:
    """Return the processor time of this process and its descendants, including those that were waited for."""
    ended = os.times()
    total = time.process_time() + ended.children_user + ended.children_system
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def formatted(seconds: Seconds, unit: str = "s") -> str:
    """Return the text of a cell: the median, and in brackets the minimum and the processor time."""
    factor, digits = {"s": (1, 2), "ms": (1e3, 2)}[unit]
    values = [factor * value for value in (seconds.median, seconds.least, median(seconds.cpu))]
    return "{:.{d}f} {unit} ({:.{d}f}, {:.{d}f})".format(*values, d=digits, unit=unit)


class Arguments(argparse.ArgumentParser):
    """The options of a script, described by its docstring: with --tiny those in `tiny` have these values by default."""

    def __init__(self, description: str | None, **tiny: Any) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.tiny = tiny
        if tiny:
            what = "the smallest sizes, to see within seconds whether the script runs; its figures have no meaning"
            self.add_argument("--tiny", action="store_true", help=what)

    def parse_known_args(self, args=None, namespace=None):  # parse_args calls it
        parsed = super().parse_known_args(args, namespace)
        if self.tiny and parsed[0].tiny:
            self.set_defaults(**self.tiny)
            parsed = super().parse_known_args(args, namespace)
        return parsed


def arguments(description: str | None, **tiny: Any) -> Arguments:
    """Return a parser of a script that reports rows."""
    parser = Arguments(description, **tiny)
    parser.add_argument("--json", type=Path, help="file to write the rows and the machine to")
    return parser


def report(rows: list[Row], file: Path | None) -> None:
    """Print the rows as a table, and write them to a file if one is given."""
    print(f"\n{table(rows)}")
    if file is not None:
        write(rows, file)


def write(rows: list[Row], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]).replace(f"--json {file}", "").split()
    result = {"machine": machine(), "command": " ".join(command), "rows": [asdict(row) for row in rows]}
    file.write_text(json.dumps(result, indent=1))


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    return "\n".join([HEAD, *map(line, rows)])


def line(row: Row) -> str:
    value = "" if row.value is None else f"{row.value:.3g}"
    return f"| {row.what} | {row.ours} | {row.other} | {value} | {row.target} |"


def machine() -> str:
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    vector = next((name for name in ("avx512f", "avx2") if name in flags), "no AVX")
    memory = psutil.virtual_memory().total / 2**30
    return f"{os.cpu_count()} cores {names[0] if names else platform.processor()} ({vector}), {memory:.0f} GiB"

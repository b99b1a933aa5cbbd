"""Two or more ways to do the same, timed in turn (A B A B ...) in one tree of processes, and their table."""

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

import psutil

ROUNDS = 5
HEAD = "| what | here | beside | value | bar |\n|---|---|---|--:|---|"


@dataclass(frozen=True)
class Seconds:
    """What every round of a side took: on the clock, and of processors' time over all processes."""

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
    """A line of docs/performance.md: what was measured, the figures as text, a ratio, and what it has to keep to."""

    what: str
    ours: str
    other: str
    value: float | None = None  # what the bar is about: a speed-up, a share, a cost over another, milliseconds
    bar: str = ""  # "at least 2 (aim 4)" or "at most 1.2 (aim 1.1)"

    @property
    def within(self) -> float | None:
        """How far the value keeps to the bar: above 1 it does. None without either."""
        kind, _, rest = self.bar.partition(" ")[2].partition(" ")
        if self.value is None or kind not in ("least", "most"):
            return None
        bar = float(rest.split()[0])
        return self.value / bar if kind == "least" else bar / self.value


def in_turn(sides: Mapping[str, Callable[[], object]], rounds: int = ROUNDS, warm_up: int = 1) -> dict[str, Seconds]:
    """Time each side once a round, one after another; rounds before the first counted one fill caches."""
    found = {name: Seconds([], []) for name in sides}
    for number in range(-warm_up, rounds):
        for name, work in sides.items():
            gc.collect()
            cpu, wall = cpu_seconds(), time.perf_counter()
            work()
            wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
            if number >= 0:
                found[name].wall.append(wall)
                found[name].cpu.append(cpu)
    return found


def cpu_seconds() -> float:
    """Processor time of this process and of those under it, also of those that have ended and were waited for."""
    ended = os.times()
    total = time.process_time() + ended.children_user + ended.children_system
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def told(seconds: Seconds, unit: str = "s") -> str:
    """Median, least and processor time as one cell."""
    factor, digits = {"s": (1, 2), "ms": (1e3, 2)}[unit]
    values = [factor * value for value in (seconds.median, seconds.least, median(seconds.cpu))]
    return "{:.{d}f} {unit} (least {:.{d}f}, CPU {:.{d}f})".format(*values, d=digits, unit=unit)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """What every script takes."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="file to write the rows and the machine to")
    return parser


def report(rows: list[Row], file: Path | None) -> None:
    """Print the rows as a table, and write them where asked for."""
    print(f"\n{table(rows)}")
    if file is not None:
        write(rows, file)


def write(rows: list[Row], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]).replace(f"--json {file}", "").split()
    found = {"machine": machine(), "command": " ".join(command), "rows": [asdict(row) for row in rows]}
    file.write_text(json.dumps(found, indent=1))


def table(rows: list[Row]) -> str:
    """The rows in Markdown."""
    return "\n".join([HEAD, *map(line, rows)])


def line(row: Row) -> str:
    value = "" if row.value is None else f"{row.value:.3g}"
    return f"| {row.what} | {row.ours} | {row.other} | {value} | {row.bar} |"


def machine() -> str:
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    vector = next((name for name in ("avx512f", "avx2") if name in flags), "no AVX")
    memory = psutil.virtual_memory().total / 2**30
    return f"{os.cpu_count()} cores {names[0] if names else platform.processor()} ({vector}), {memory:.0f} GiB"

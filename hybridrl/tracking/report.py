"""`metrics.jsonl`, and a report of a run from this file alone: curves as a picture, and a summary as text.

Each `log` call is one line `{"step": N, ...}`, on disk when the call returns. A second call for a step is a second
line, so nothing is buffered until a step ends; `read_metrics` joins them.
"""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

from hybridrl import project_file
from hybridrl.tracking import sink as names
from hybridrl.tracking.console import warn
from hybridrl.tracking.faults import FILE
from hybridrl.tracking.sink import Sink

Metrics = dict[str, float]
Series = dict[int, float]  # step -> value
Warn = Callable[[str, str], None]  # called with a text and its code

CURVES = "curves.png"
LAST_STEPS = 5
CONTENTS = {
    "config.yaml": "the configuration of the run",
    "metrics.jsonl": "all metrics, one line per step",
    FILE: "warnings, and how the run ended: hybridrl why",
    "report.html": "everything about the run on one page",
    CURVES: "the curves",
    "samples": "validation samples",
    "rollouts": "training samples",
    "tensorboard": "for `tensorboard --logdir`",
    "wandb": "the Weights & Biases run",
    "logs": "one log per process",
    "global_step_*": "checkpoints",
}
SECONDS_BETWEEN_CURVES = 60.0  # at least
ROUNDING = 1e-6  # relative rounding error of float32
COLORS = ("#2563eb", "#ea580c", "#059669", "#7c3aed", "#db2777", "#64748b")
INK, MUTED, GRID = "#1e293b", "#64748b", "#e2e8f0"
STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    **{f"axes.spines.{side}": False for side in ("top", "right")},
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    **{f"{axis}tick.color": MUTED for axis in "xy"},
    **{f"{axis}tick.major.size": 0 for axis in "xy"},
    "legend.frameon": False,
}


class JsonlSink(Sink):
    """Appends to the lines up to `last_step` if the run is resumed; a new run moves an existing file aside. If the disk
    is full, lines are written before the next line."""

    def __init__(self, path: Path, last_step: int | None = None) -> None:
        if last_step is not None:
            # Later steps and unreadable lines are removed atomically: a kill leaves the file unchanged.
            temporary = path.with_name(f".{path.name}.writing")
            with temporary.open("w") as file:
                file.writelines(line + "\n" for line, record in _read_lines(path) if record["step"] <= last_step)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        elif path.exists():
            free = (path.with_name(f"{path.stem}.previous-{number}{path.suffix}") for number in count(1))
            path.replace(next(other for other in free if not other.exists()))
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        # Standard JSON has no NaN and no infinity; Python's dialect would need Python to read it.
        values = {
            name: value if isinstance(value, int) else float(value) if math.isfinite(value) else None
            for name, value in metrics.items()
        }
        self._unwritten += json.dumps({"step": step} | values).encode() + b"\n"
        self._write()

    def _write(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def state_dict(self) -> dict[str, Any]:
        self._write()
        os.fsync(self._file.fileno())
        return {}

    def close(self) -> None:
        with self._file:
            self._write()


class CurvesSink(Sink):
    """Draws `curves.png` during the run, in a thread, in at most 1% of the time."""

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._run_dir, self._clock = run_dir, clock
        self._next = clock() + SECONDS_BETWEEN_CURVES
        self.thread: threading.Thread | None = None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if self._clock() >= self._next and (self.thread is None or not self.thread.is_alive()):
            self.thread = threading.Thread(target=self._draw)
            self.thread.start()

    def _draw(self) -> None:
        began = self._clock()
        with suppress(OSError):  # a full disk; the next drawing may succeed
            draw_curves(self._run_dir)
        self._next = self._clock() + max(SECONDS_BETWEEN_CURVES, 100 * (self._clock() - began))

    def close(self) -> None:
        if self.thread is not None:
            self.thread.join()


@dataclass(frozen=True)
class Change:
    """`before`: value of the first step, sampled before any update, or of the first validation. `after`: mean of the
    last `count` steps, or value of the last validation."""

    before: float
    after: float
    count: int

    @property
    def definition(self) -> str:
        """The meaning of the two numbers, for a reader."""
        return "first step; last step" if self.count == 1 else f"first step; mean of the last {self.count}"


def last_steps(steps: int) -> int:
    """Return the number of steps that count as the last ones: five, in a short run half of `steps`."""
    return min(LAST_STEPS, max(1, steps // 2))


def change_of(name: str, values: Sequence[float]) -> Change:
    """Return a metric before and after training, from its values in order. Values of validations are not averaged:
    each is a mean over many responses already. Raises ValueError if there are no values."""
    if not values:
        raise ValueError(f"{name} has no values")
    alone = names.is_validation_score(name) or name.startswith(("val-aux/", "val/"))
    count = 1 if alone else last_steps(len(values))
    return Change(values[0], fmean(values[-count:]), count)


def read_metrics(run_dir: Path, warn: Warn = warn) -> dict[int, dict[str, float]]:
    """Return the metrics by step, in order; for a name logged twice in a step, the later value. null is NaN. Unreadable
    lines are passed to `warn`."""
    steps: dict[int, dict[str, float]] = {}
    try:
        lines = _read_lines(run_dir / "metrics.jsonl", warn)
    except OSError as error:
        warn(f"{run_dir / 'metrics.jsonl'} cannot be read: {error.strerror}", "metrics-lost")
        lines = []
    for _, record in lines:
        values = {name: math.nan if value is None else value for name, value in record.items()}
        steps.setdefault(int(values.pop("step")), {}).update(values)
    return dict(sorted(steps.items()))


def _read_lines(path: Path, warn: Warn = warn) -> list[tuple[str, dict[str, float | None]]]:
    """Return the readable lines with their records. A killed run may leave an incomplete line at the end, and a machine
    that lost power a line of zeros."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    lines = []
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        record: dict[str, float | None] = {}
        try:
            record = json.loads(line)
            finite = [math.isfinite(value) for value in record.values() if value is not None]  # else TypeError
            readable = bool(finite) and isinstance(record.get("step"), int)
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            readable = False
        if readable:
            lines.append((line, record))
        else:
            warn(f"{path}, line {number} cannot be read as metrics and is skipped: {line[:40]!r}", "metrics-lost")
    return lines


def draw_curves(run_dir: Path) -> Path | None:
    """Draw `curves.png`, titled with the directory's name. Returns None if there is nothing to draw."""
    panels = _panels(read_metrics(run_dir))
    return _draw(panels, run_dir.name, run_dir / CURVES) if panels else None


def draw_runs(directory: Path, runs: Mapping[str, Path]) -> Path:
    """Draw `sweep.png`: the curves of several runs, by name, over each other."""
    panels: dict[str, dict[str, Series]] = {}
    for name, run_dir in runs.items():
        for panel, lines in _panels(read_metrics(run_dir)).items():
            panels.setdefault(panel, {})[name] = next(iter(lines.values()))
    return _draw(panels, directory.name, directory / "sweep.png")


def _draw(panels: dict[str, dict[str, Series]], title: str, file: Path) -> Path:
    # matplotlib takes half a second to import and is used only here.
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with rc_context(STYLE):
        figure = Figure(figsize=(4.4 * len(panels) + 0.4, 3.6), layout=ConstrainedLayoutEngine(w_pad=0.12))
        figure.suptitle(title, x=0.015, ha="left", fontsize=14, fontweight="bold")
        grid = figure.subplots(1, len(panels), squeeze=False, sharex=True)
        for number, (axes, (panel, lines)) in enumerate(zip(grid[0], panels.items(), strict=True)):
            axes.set_title(panel, pad=10)
            _draw_lines(axes, lines, first_color=number if len(lines) == 1 else 0)
        whole = file.with_name(f".{file.name}.writing")  # a reader never sees half a picture
        figure.savefig(whole, dpi=150, facecolor="white", format="png")
        whole.replace(file)
    return file


def _draw_lines(axes, lines: dict[str, Series], first_color: int) -> None:
    axes.set_xlabel("step")
    axes.locator_params(axis="x", integer=True, nbins=6)
    axes.margins(x=0.03, y=0.08)
    for number, (name, series) in enumerate(lines.items()):
        color = COLORS[(first_color + number) % len(COLORS)]
        steps, values = list(series), list(series.values())
        width, marker = (2, "o") if len(values) <= 50 else (1.2, "")
        change = change_of(name, values)
        label = f"{name}: {change.after:.3g}"
        axes.plot(steps, values, color=color, linewidth=width, marker=marker, markersize=4, label=label)
        if len(lines) == 1:
            axes.set_ylabel(name)
            shown = f"{change.before:.3g} → {change.after:.3g}"
            axes.set_title(shown, loc="right", pad=10, fontweight="normal")
    if len(lines) > 1:
        axes.legend(fontsize=8)
    every = [value for series in lines.values() for value in series.values()]
    if max(every) - min(every) <= ROUNDING * (size := max(map(abs, every))):  # else rounding would fill the panel
        axes.set_ylim(min(every) - 0.1 * (size or 1.0), max(every) + 0.1 * (size or 1.0))


def summary(run_dir: Path) -> str:
    """Return the main metrics (before and after training, and best), the seconds per phase, and the run's files."""
    steps = read_metrics(run_dir)
    changes = _changes(steps)
    rows = [("", "before", "after", "best")]
    rows += [(name, f"{change.before:.4g}", f"{change.after:.4g}", best) for name, (change, best) in changes.items()]
    definition = max((change.definition for change, _ in changes.values()), key=len, default="")
    blocks, width = [], max(len(name) for name, *_ in rows)
    if len(rows) > 1:
        lines = [f"{name:<{width}}{before:>10}{after:>10}  {best}" for name, before, after, best in rows]
        blocks.append([*lines, f"({definition})"])
    if total := sum(names.line_seconds(metrics) for metrics in steps.values()):
        seconds = dict.fromkeys(names.PHASES, 0.0)
        for metrics in steps.values():
            for phase, spent in names.phase_seconds(metrics).items():
                seconds[phase] += spent
        seconds["other"] = total - sum(seconds.values())
        parts = [f"  {phase:<14}{spent:10.1f} s {spent / total:7.1%}" for phase, spent in seconds.items() if spent > 0]
        blocks.append([f"{'total seconds':<16}{total:10.1f} s", *parts])
    if diagnoses := sorted(held_diagnoses(steps).items()):
        blocks.append(
            [
                f"diagnoses ({project_file('docs/health.md')})",
                *(f"  {code:<18}{ranges(where)}" for code, where in diagnoses),
            ]
        )
    files = [f"  {pattern:<16}{meaning}" for pattern, meaning in CONTENTS.items() if any(run_dir.glob(pattern))]
    blocks.append([f"output directory: {run_dir}", *files])
    return "\n\n".join("\n".join(block) for block in blocks)


def run_table(runs: Mapping[str, Path]) -> str:
    """Return a table of several runs by name: steps, seconds, and main metrics (before, after, best)."""
    rows = [("run", "steps", "seconds", "metric", "before", "after", "best")]
    for name, run_dir in runs.items():
        steps = read_metrics(run_dir)
        seconds = sum(names.line_seconds(metrics) for metrics in steps.values())
        cells = (name, str(max(steps, default=0)), f"{seconds:.0f}")
        for metric, (change, best) in _changes(steps).items():
            if best:
                rows.append((*cells, metric, f"{change.before:.4g}", f"{change.after:.4g}", best))
                cells = ("", "", "")
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _changes(steps: dict[int, Metrics]) -> dict[str, tuple[Change, str]]:
    """Return the change of each main metric, and its best value; neither a long nor a short response is better."""
    changes = {}
    for panel, lines in _panels(steps).items():
        for name, series in lines.items():
            step = (min if panel == "Loss" else max)(series, key=series.__getitem__)
            best = "" if panel == "Response length" else f"{series[step]:.4g} (step {step})"
            changes[name] = change_of(name, list(series.values())), best
    return changes


def held_diagnoses(steps: Mapping[int, Metrics]) -> dict[str, list[int]]:
    """Return the training steps in which each diagnosis held, by code."""
    steps_by_code: dict[str, list[int]] = {}
    for step, metrics in steps.items():
        for name in metrics:
            if name.startswith("health/") and metrics[name] and step > 0:
                steps_by_code.setdefault(name.removeprefix("health/"), []).append(step)
    return steps_by_code


def ranges(steps: Sequence[int], most: int | None = None) -> str:
    """Return steps as text, "steps 3 to 7, 12": at most `most` ranges, and the number of omitted ones."""
    if not steps:
        return ""
    inside = set(steps)
    begins = [step for step in steps if step - 1 not in inside]
    ends = [step for step in steps if step + 1 not in inside]
    texts = [f"{a} to {b}" if a < b else f"{a}" for a, b in zip(begins, ends, strict=True)]
    omitted = len(texts) - len(texts[:most])
    return f"steps {', '.join(texts[:most])}" + f" and {omitted} more" * (omitted > 0)


def _panels(steps: dict[int, Metrics]) -> dict[str, dict[str, Series]]:
    """Return panel title -> metric -> finite values by step, without empty panels."""
    logged = sorted({name for metrics in steps.values() for name in metrics})
    chosen = {
        "Training reward": [name for name in names.REWARD if name in logged][:1],
        "Validation": [name for name in logged if names.is_validation_score(name)],
        "Response length": [name for name in logged if name == names.RESPONSE_LENGTH],
        "Loss": [name for name in names.LOSSES if name in logged],
    }
    panels: dict[str, dict[str, Series]] = {}
    for panel, metrics in chosen.items():
        for name in metrics:
            series = {step: line[name] for step, line in steps.items() if math.isfinite(line.get(name, math.nan))}
            if series:
                panels.setdefault(panel, {})[name] = series
    return panels

"""Console output: messages of the driver, one line per step, and on a terminal a progress bar.

Messages during the progress bar must use `info` and `warn`: these keep the bar below them.
"""

import errno
import json
import logging
import sys
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from itertools import pairwise

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from hybridrl.tracking import sink as names
from hybridrl.tracking.faults import record
from hybridrl.tracking.secrets import mask_text
from hybridrl.tracking.sink import Activity, SampleRow, Sink

SHOWN_CHARACTERS = 240
SECONDS_ON_TERMINAL, SECONDS_IN_LOG = 0.5, 2.0  # between two lines of steps
HEADER_EVERY, COLUMN_WIDTH, REWARDS = 25, 9, 5  # rows; characters; earlier steps to compare a reward with
SECONDS_OF_SILENCE = 60.0  # in a log, until a line reports the present work of a long step


def printable(text: str) -> str:
    """Return a text from outside without characters that could change the terminal: escape codes, carriage returns,
    and direction marks."""
    return "".join(c if _is_harmless(c) else "\N{REPLACEMENT CHARACTER}" for c in text.replace("\r\n", "\n"))


def printable_json(text: str) -> str:
    """Return JSON with such characters as escape sequences."""
    return "".join(c if _is_harmless(c) else json.dumps(c)[1:-1] for c in text)


def _is_harmless(character: str) -> bool:
    return character.isprintable() or character in "\n\t" or unicodedata.category(character) == "Zs"


class Terminal(Console):
    """A console that makes every text printable; styles and tables are as usual."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


console = Terminal()


def print_text(text: str, *, error: bool = False) -> None:
    """Print a text that may come from outside to standard output, or to standard error."""
    print(printable(text), file=sys.stderr if error else sys.stdout, flush=True)


def info(text: str) -> None:
    _print(Text(mask_text(text)))


def warn(text: str, code: str = "") -> None:
    """Print a warning, and record it in `faults.jsonl`; `code` names its section of docs/errors.md."""
    text = mask_text(text)
    record(code or "warning", text)
    _print(Text.assemble(("warning: ", "yellow"), f"{text} [{code}]" if code else text))


def on_terminal() -> bool:
    """Whether the output can be updated in place."""
    return console.file.isatty() and not console.is_dumb_terminal


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Show a named stage, on a terminal with a spinner and its present `Activity`, and log its duration."""
    began, terminal = time.monotonic(), on_terminal()
    if not terminal:
        info(f"{name} ...")
    with _running(name) if terminal else nullcontext():
        yield
    info(f"{name}: {time.monotonic() - began:.1f} s")


@contextmanager
def _running(name: str) -> Iterator[None]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as progress:
        task = progress.add_task(name)
        Activity.watcher = lambda what: progress.update(task, description=f"{name}: {what}")
        try:
            yield
        finally:
            Activity.watcher = None


def _print(text: Text) -> None:
    try:
        console.print(text, soft_wrap=True)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO):  # a full disk or a lost terminal does not end a run
            raise


class MessageHandler(logging.Handler):
    """Prints log records like `info` and `warn`, without date and level."""

    def emit(self, record: logging.LogRecord) -> None:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        _print(Text.assemble((level, "yellow"), mask_text(self.format(record))))


class VerlSink(Sink):
    """`step:N - key:value - key:value ...`: all metrics in verl's line format, for scripts that parse it."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def log(self, step: int, metrics: dict[str, float]) -> None:
        values = [f"{name}:{value if isinstance(value, int) else f'{value:.6g}'}" for name, value in metrics.items()]
        self._console.print(Text(" - ".join([f"step:{step}", *values])), soft_wrap=True)


class LineSink(Sink):
    """One line per step with its main metrics. Quick steps get fewer lines, except validations and the last step. A
    long step gets a line per minute with its present work."""

    seconds_between = SECONDS_IN_LOG

    def __init__(
        self, console: Console, total_steps: int, start_step: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._total_steps, self._step, self._clock = console, total_steps, start_step, clock
        self._last_line = self._last_heard = float("-inf")
        Activity.watcher = self.doing

    def doing(self, what: str) -> None:
        """Show the present work of the run."""
        now = self._clock()
        if self._last_heard < 0:
            self._last_heard = now
        if now - self._last_heard >= SECONDS_OF_SILENCE:
            self._last_heard = now
            self._console.print(Text(f"step {self._step + 1} ... {what}"), soft_wrap=True)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._step, self._last_heard = step, self._clock()
        self._line(step, metrics, self._last_heard)

    def close(self) -> None:
        Activity.watcher = None

    def _line(self, step: int, metrics: dict[str, float], now: float) -> None:
        always = step == self._total_steps or any(map(names.is_validation_score, metrics))
        if always or now - self._last_line >= self.seconds_between:
            self._last_line = now
            self._show(step, metrics)

    def _show(self, step: int, metrics: dict[str, float]) -> None:
        self._console.print(step_line(step, metrics), soft_wrap=True)

    def samples(self, step: int, rows: list[SampleRow]) -> None:
        self._console.print(sample_table(f"validation samples, step {step}", rows))


class TerminalSink(LineSink):
    """A table with a row per step; below it a progress bar with the remaining time and the present work. A reward above
    the mean of the steps before it is green."""

    seconds_between = SECONDS_ON_TERMINAL

    def __init__(
        self, console: Console, total_steps: int, start_step: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(console, total_steps, start_step, clock)
        self._step_ends: list[float] = []
        self._columns: list[str] = []
        self._rows = 0
        self._rewards: deque[float] = deque(maxlen=REWARDS)
        done, texts = (BarColumn(20), MofNCompleteColumn(), TextColumn("steps")), ("left", "now")
        fields = [TextColumn(f"{{task.fields[{name}]}}") for name in texts]
        self.progress = Progress(*done, TimeElapsedColumn(), *fields, console=console, refresh_per_second=2)
        self._bar = self.progress.add_task("", total=total_steps, completed=start_step, left="", now="")
        self.progress.start()

    def doing(self, what: str) -> None:
        self.progress.update(self._bar, now=what)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._line(step, metrics, now := self._clock())
        if step > self._step:
            self._step = step
            self._step_ends.append(now)
            seconds = seconds_left(self._step_ends, self._total_steps - step)
            left = f"{timedelta(seconds=round(seconds))} left" if seconds else ""
            self.progress.update(self._bar, completed=step, left=left)

    def _show(self, step: int, metrics: dict[str, float]) -> None:
        values = main_values(metrics)
        shown = {name for name, (value, _) in values.items() if value is not None}
        if not shown & {"reward", "loss"}:  # the start, or a validation before the first step
            return self._print(step_line(step, metrics))
        new = not shown <= {*self._columns}
        if new:
            shown |= {"val"} if "reward" in shown else {"val loss"}
            self._columns = [name for name in values if name in shown or name in self._columns]
        if new or self._rows % HEADER_EVERY == 0:
            titles = (f"{name or 'seconds':>{COLUMN_WIDTH}}" for name in self._columns)
            self._print(Text(" step" + "".join(titles), "dim"))
        self._rows += 1
        row = Text(f"{step:>5}")
        for name in self._columns:
            value, form = values[name]
            row.append(f"{'' if value is None else f'{value:{form}}':>{COLUMN_WIDTH}}", self._style(name, value))
        self._print(row)

    def _style(self, name: str, value: float | None) -> str:
        if name != "reward" or value is None:
            return {"": "cyan", "val": "bold"}.get(name, "")
        rises = bool(self._rewards) and value > sum(self._rewards) / len(self._rewards)
        self._rewards.append(value)
        return "bold green" if rises else "bold"

    def _print(self, line: Text) -> None:
        # Cropped, not wrapped: a step is one line on a narrow terminal too.
        self._console.print(line, no_wrap=True, overflow="ellipsis")

    def close(self) -> None:
        super().close()
        self.progress.update(self._bar, now="")
        self.progress.stop()


def seconds_left(step_ends: list[float], steps_left: int) -> float | None:
    """Return the mean step time x `steps_left`; the first interval, a warm-up, is left out if there are others."""
    times = [end - start for start, end in pairwise(step_ends)]
    times = times[1:] or times
    return sum(times) / len(times) * steps_left if times else None


def main_values(metrics: dict[str, float]) -> dict[str, tuple[float | None, str]]:
    """Return the main metrics of a step by short names, with their formats; None: not logged. The most important come
    first, since a narrow terminal crops the rest. The name of the seconds is empty."""
    scores = [value for name, value in metrics.items() if names.is_validation_score(name)]
    timed = names.phase_seconds(metrics) or names.STEP_SECONDS in metrics
    return {
        "reward": (next((metrics[name] for name in names.REWARD if name in metrics), None), ".3f"),
        "val": (sum(scores) / len(scores) if scores else None, ".3f"),
        "loss": (metrics.get("train/loss"), ".4f"),
        "val loss": (metrics.get("val/loss"), ".4f"),
        "length": (metrics.get(names.RESPONSE_LENGTH), ".1f"),
        "": (names.line_seconds(metrics) if timed else None, ".1f"),
        "entropy": (metrics.get("actor/entropy"), ".3f"),
        "kl": (metrics.get("actor/ppo_kl"), ".1e"),
        "lr": (metrics.get("train/lr"), ".1e"),
        "grad": (metrics.get("actor/grad_norm", metrics.get("train/grad_norm")), ".3g"),
        "tokens/s": (metrics.get("perf/throughput"), ".0f"),
        "engine restarts": (metrics.get("rollout/engine_restarts") or None, ".0f"),
    }


def step_line(step: int, metrics: dict[str, float]) -> Text:
    """Return the main metrics of a step in one line, with the seconds per phase; metrics not logged are left out."""
    phases = [f"{phase} {seconds:.1f}" for phase, seconds in names.phase_seconds(metrics).items()]
    line = Text(f"step {step:<4}")
    for name, (value, form) in main_values(metrics).items():
        if value is not None and name:
            line.append(f" {name} ", "dim").append(f"{value:{form}}", "bold")
        elif value is not None:
            line.append(f"  {value:{form}}s ", "cyan")
    if phases:
        line.append(f" ({' '.join(phases)})", "dim")
    return line


def sample_table(title: str, rows: list[SampleRow]) -> Table:
    table = Table(title=title, title_justify="left", show_lines=True)
    for column in ("prompt", "response", "ground truth"):
        table.add_column(column, overflow="fold")
    table.add_column("score", justify="right")
    for row in rows:
        cells = (Text(_shown(text)) for text in (row.prompt, row.response, row.ground_truth))
        table.add_row(*cells, f"{row.score:.3g}")
    return table


def _shown(text: str) -> str:
    """Shorten a long text to both its ends."""
    if len(text) > SHOWN_CHARACTERS:
        text = f"{text[: SHOWN_CHARACTERS // 2]} ... {text[-SHOWN_CHARACTERS // 2 :]}"
    return text.strip()

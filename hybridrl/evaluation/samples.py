"""The samples of an evaluation in one file. They are written as they finish, and looked up by a key of their origin.

A line that a kill cut off is removed. A later line of the same sample replaces the earlier one: a changed reward scores
the stored responses again.
"""

import fcntl
import json
import threading
import time
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hybridrl.config import ConfigError
from hybridrl.core.experience.trajectory import TRUNCATED
from hybridrl.tracking.console import console, info, on_terminal, warn
from hybridrl.tracking.records import json_text

QUESTIONS, SAMPLES, TABLE = "questions.jsonl", "samples.jsonl", "table.md"
GREEDY = -1  # the number of the greedy sample
LOG_SECONDS = 60.0  # between two lines about the progress


@dataclass(frozen=True)
class Sample:
    """One response to a question with its score.

    `key`: digest of model, sampling, prompt and seed. `reward`: digest of the reward function and its inputs from the
    row. `seconds` count from the start of the evaluation. `conversation` has messages and turns.
    """

    dataset: str
    id: str
    sample: int
    seed: int
    prompt: str
    response: str
    truth: Any
    tokens: int
    finish: str
    score: float | None
    extras: dict[str, Any] = field(default_factory=dict)
    pred: str | None = None
    fault: str | None = None
    detail: str = ""
    seconds: float = 0.0
    key: str = ""
    reward: str = ""
    conversation: dict[str, Any] = field(default_factory=dict)

    @property
    def value(self) -> float | None:
        """The value that the evaluation averages: `acc` if the reward gives it, else the score; None after a fault."""
        accuracy = self.extras.get("acc")
        return self.score if self.score is None or not isinstance(accuracy, bool | int | float) else float(accuracy)

    @property
    def truncated(self) -> bool:
        return self.finish in TRUNCATED

    @property
    def greedy(self) -> bool:
        return self.sample == GREEDY


NAMES = {item.name for item in fields(Sample)}


class SampleFile:
    """`samples.jsonl` of an evaluation, locked while it is open. With `resume` it keeps the earlier samples; without,
    an earlier file is renamed when the first sample is written."""

    def __init__(self, path: Path, *, resume: bool = True) -> None:
        self.path, self.replaced = path, 0
        self.samples: dict[str, Sample] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = _locked(path)
        self.renames = not resume and path.stat().st_size > 0
        if resume:
            self.samples, size = _read(path)
            if size < path.stat().st_size:
                info(f"{path}: the last line is cut off and will be sampled again")
                self.file.truncate(size)

    def has(self, key: str) -> bool:
        """Whether there is a response for this key. A response lost by a fault does not count: it is sampled again."""
        sample = self.samples.get(key)
        return sample is not None and not (sample.fault and not sample.response and not sample.tokens)

    def is_stale(self, key: str, reward: str) -> bool:
        """Whether a response must be scored again: the reward changed, or the grader failed."""
        return self.samples[key].reward != reward or self.samples[key].fault is not None

    def append(self, sample: Sample) -> None:
        """Write a sample. It replaces an earlier one with the same key."""
        if self.renames:
            self._rename()
        self.replaced += sample.key in self.samples
        self.samples[sample.key] = sample
        self.file.write(_line(sample))
        self.file.flush()

    def _rename(self) -> None:
        """Keep the earlier file under another name, and start an empty one."""
        names = (self.path.with_name(f"{self.path.stem}.previous-{number}.jsonl") for number in count(1))
        previous = next(name for name in names if not name.exists())
        self.path.rename(previous)
        info(f"eval.resume=false: the earlier samples are now in {previous}")
        earlier, self.file, self.renames = self.file, _locked(self.path), False
        earlier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None and self.replaced:
            temporary = self.path.with_suffix(".writing")
            temporary.write_bytes(b"".join(map(_line, self.samples.values())))
            temporary.replace(self.path)
        self.file.close()


def _locked(path: Path) -> BinaryIO:
    """Return the file, open for appending and locked."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        fix = "wait for it, or set another eval.output_dir"
        raise ConfigError(f"{path} is being written by another evaluation", fix=fix) from None
    return file


def read_samples(path: Path) -> list[Sample]:
    """Return the samples of a file, each in its latest form. Raises ConfigError if there is none."""
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file", fix="name the directory of an evaluation")
    return list(_read(path)[0].values())


def _line(sample: Sample) -> bytes:
    return json_text(asdict(sample)).encode("utf-8", "backslashreplace") + b"\n"


def _read(path: Path) -> tuple[dict[str, Sample], int]:
    """Return the samples by key, and the number of bytes up to the last whole line."""
    samples, size, unreadable = {}, 0, 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            size += len(line)
            try:
                sample = _sample(json.loads(line))
            except (ValueError, TypeError, AttributeError):
                unreadable += 1
                continue
            samples[sample.key] = sample
    if unreadable:
        warn(f"{path}: {unreadable} lines cannot be read; they are left out, and removed when the file is rewritten")
    return samples, size


def _sample(values: dict[str, Any]) -> Sample:
    return Sample(**{name: value for name, value in values.items() if name in NAMES})


class EvaluationProgress:
    """Shows how many of `total` samples are finished: a bar on a terminal, a line per minute in a log. Called with each
    sample."""

    def __init__(self, total: int, log_seconds: float = LOG_SECONDS) -> None:
        self.total, self.log_seconds, self.done, self.tokens = total, log_seconds, 0, 0
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
        while not self.ended.wait(self.log_seconds):
            info(f"{self.done}/{self.total} samples{self._now()}")

    def _now(self) -> str:
        """Return the known ones of speed, time left and mean."""
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

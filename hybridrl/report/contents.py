"""What a run's directory holds, as the page needs it. Reads whatever is there; what is missing or torn is a note."""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import yaml

from hybridrl.checkpoint.store import holder
from hybridrl.config.files import SHARDS
from hybridrl.tracking.faults import BEGUN, FINISHED, STOPPED, Fault, last_lines, last_run, read_end, read_faults
from hybridrl.tracking.records import record_files, records_of
from hybridrl.tracking.report import read_metrics
from hybridrl.tracking.secrets import mask_text, mask_values
from hybridrl.tracking.sink import PHASES, STEP_SECONDS, line_seconds, phase_seconds

T = TypeVar("T")
Metrics = dict[str, float]

UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
    OverflowError,
    yaml.YAMLError,
    RecursionError,
)
LARGEST = 1e100  # beyond it a number is no measurement
LOG_BYTES, LOG_LINES, LOG_SHOWN = 1 << 16, 60, 12_000  # read of the end of a log; lines and characters shown
NO_METRICS = "metrics.jsonl has no steps: no curves"
TRACEBACK = re.compile(r"^(.*?)Traceback \(most recent call last\):", re.MULTILINE)


@dataclass(frozen=True)
class SavedCheckpoint:
    """A `global_step_N`: bytes as the manifest has them, what is wrong with it (empty: nothing that sizes show), and
    what a run lacks to resume from it."""

    step: int
    name: str
    size: int
    kind: str  # kept, recovery, verl, unreadable
    problem: str
    code: dict[str, Any]
    lacks: str = ""

    @property
    def resumable(self) -> bool:
        return not self.problem and not self.lacks and self.kind != "unreadable"


@dataclass(frozen=True)
class LogExcerpt:
    """The end of a log, or the traceback in it."""

    name: str
    text: str
    is_traceback: bool


@dataclass
class Contents:
    """All of a run but its samples. `notes` say what is missing or cannot be read."""

    directory: Path
    name: str
    steps: dict[int, Metrics]
    faults: list[Fault]
    config: dict[str, Any]
    config_text: str
    checkpoints: list[SavedCheckpoint]
    user: str  # the process that uses the directory now
    training: dict[int, Path]  # files of samples by step
    validation: dict[int, Path]
    notes: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        return max(self.steps, default=0)

    @cached_property
    def trained(self) -> dict[int, Metrics]:
        """The metrics of training steps only."""
        return {step: metrics for step, metrics in self.steps.items() if step > 0}

    @cached_property
    def supervised(self) -> bool:
        """Whether the run is supervised, by what it logged."""
        return any("train/loss" in metrics for metrics in self.steps.values())

    @property
    def end(self) -> Fault | None:
        """How the last run of the directory ended; None: it runs, or it was killed."""
        last = last_run(self.faults) or self.faults
        return last[-1] if last and last[-1].end else None

    @property
    def began(self) -> str:
        """When the run began, before it was resumed: an earlier run in the same directory is another one."""
        begins = [fault.time for fault in self.faults if fault.code == BEGUN]
        return begins[-1 - min(len(self.resumes), len(begins) - 1)] if begins else ""

    @property
    def crashed(self) -> bool:
        if self.end is not None:
            return self.end.code not in (FINISHED, STOPPED)
        return bool(self.faults) and not self.user

    @property
    def ending(self) -> str:
        """How the run ended, or that it has not, as a part of a sentence."""
        if self.end is None and self.user:
            return "running"
        if self.end is None:
            where = f"after step {self.last_step}" if self.last_step else "before its first step"
            return f"killed {where}" if self.faults else "no record of how it ended"
        if self.end.code == FINISHED:
            return "ended normally"
        if self.end.code == STOPPED:
            return f"stopped on request in step {self.end.step}"
        where = f"in step {self.end.step}" if self.end.step else "before its first step"
        return f"failed {where} [{self.end.code}]"

    @cached_property
    def resumes(self) -> list[int]:
        """The first step of each time that the run was resumed."""
        return [step for step, metrics in self.trained.items() if "timing_s/start_up" in metrics]

    @cached_property
    def held(self) -> dict[str, list[int]]:
        """The steps in which each diagnosis held, by code."""
        held: dict[str, list[int]] = {}
        for step, metrics in self.trained.items():
            for name in metrics:
                if name.startswith("health/") and metrics[name]:
                    held.setdefault(name.removeprefix("health/"), []).append(step)
        return held

    @property
    def seconds(self) -> float:
        return sum(value for metrics in self.steps.values() if math.isfinite(value := line_seconds(metrics)))

    @cached_property
    def phases(self) -> dict[int, dict[str, float]]:
        """Seconds by phase of every training step that was timed; "other" is what no timer covers."""
        table = {}
        for step, metrics in self.trained.items():
            spent = {name: value for name, value in phase_seconds(metrics).items() if math.isfinite(value)}
            inside = sum(spent.get(name, 0.0) for name in PHASES if name not in ("start-up", "validation", "saving"))
            if other := max(0.0, metrics.get(STEP_SECONDS, 0.0) - inside):
                spent["other"] = other
            if spent:
                table[step] = spent
        return table

    @cached_property
    def samples_per_step(self) -> int:
        """Responses that a step trains on, by the configuration; 0 if it is not known."""
        try:
            rows = int(self.config["data"]["train_batch_size"])
            rollout = self.config.get("actor_rollout_ref", {}).get("rollout", {})
            return rows * int(rollout.get("n", 1))
        except UNREADABLE:
            return 0


def read_contents(directory: Path, name: str = "") -> Contents:
    """Read a run's directory; never raises for what it holds or lacks."""
    notes: list[str] = []

    def attempt(what: str, read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except UNREADABLE as error:
            notes.append(f"{what} cannot be read: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            return otherwise

    config = attempt("config.yaml", lambda: _mapping(directory / "config.yaml"), {})
    places = {
        kind: attempt(f"{kind}/", lambda kind=kind: records_of(directory, kind), {}) for kind in ("rollouts", "samples")
    }
    if not any(directory.glob("rollouts")) and places["rollouts"] == places["samples"]:
        places["samples"] = {}  # the directory holds files of samples itself
    contents = Contents(
        directory=directory,
        name=name or directory.resolve().name,
        steps=attempt("metrics.jsonl", lambda: _bounded(_metrics(directory, notes)), {}),
        faults=attempt("faults.jsonl", lambda: [_masked(one) for one in read_faults(directory)], []),
        config=mask_values(config),
        config_text=yaml.safe_dump(mask_values(config), sort_keys=False, allow_unicode=True) if config else "",
        checkpoints=attempt("checkpoints", lambda: list(_checkpoints(directory)), []),
        user=attempt("lock", lambda: holder(directory), ""),
        training=places["rollouts"],
        validation=places["samples"],
        notes=notes,
    )
    notes += _absences(contents)
    return contents


def _absences(contents: Contents) -> list[str]:
    """Say what a page lacks, and why where that is known."""
    directory = contents.directory
    if not directory.is_dir():
        return [f"{directory} is not a directory"]
    notes = []
    if not contents.steps:
        notes.append(NO_METRICS)
    elif not contents.trained:
        notes.append("no step was finished: no curves of training")
    if not contents.training:
        notes.append("no training samples (trainer.rollout_data_dir is null, or the files are verl's and elsewhere)")
    if not contents.validation:
        notes.append("no validation samples: the run did not validate, or trainer.validation_data_dir is null")
    if not (directory / "config.yaml").exists():
        notes.append("no config.yaml: the configuration and what differs from the default are not known")
    if not contents.checkpoints:
        notes.append("no checkpoint was saved")
    return notes


def is_run(directory: Path) -> bool:
    """Return whether a directory holds anything that a page shows."""
    known = any((directory / name).exists() for name in ("metrics.jsonl", "faults.jsonl", "config.yaml"))
    places = (directory, directory / "rollouts", directory / "samples")
    return known or any(record_files(place) for place in places) or any(directory.glob("global_step_*"))


def log_excerpts(contents: Contents) -> list[LogExcerpt]:
    """Return tracebacks of a run that failed, the oldest first, then the ends of all logs with text."""
    logs = [path for path in contents.directory.glob("logs/*") if path.is_file()]
    logs.sort(key=lambda path: path.stat().st_mtime)
    ends = [(path.name, mask_text(last_lines(path, LOG_BYTES))) for path in logs]
    tracebacks = []
    for name, text in ends if contents.crashed else ():
        if places := list(TRACEBACK.finditer(text)):
            lines = text[places[-1].start() :].splitlines()
            tracebacks.append(LogExcerpt(name, "\n".join(lines[:LOG_LINES])[:LOG_SHOWN], True))
    tails = [
        LogExcerpt(name, "\n".join(text.splitlines()[-LOG_LINES:])[-LOG_SHOWN:], False)
        for name, text in ends
        if text.strip()
    ]
    return [*tracebacks, *tails]


def _mapping(path: Path) -> dict[str, Any]:
    loaded = yaml.load(path.read_text(encoding="utf-8", errors="replace"), yaml.CSafeLoader) if path.exists() else {}
    if not isinstance(loaded, dict):
        raise ValueError("it is no mapping of keys")
    mask_values(loaded)  # one that contains itself is none either
    return loaded


def _metrics(directory: Path, notes: list[str]) -> dict[int, Metrics]:
    steps = read_metrics(directory, lambda text, code: notes.append(text))
    if read_end(directory / "metrics.jsonl", 1) not in (b"\n", b""):
        notes.append("the last line of metrics.jsonl is not complete, and is left out")
    return steps


def _masked(fault: Fault) -> Fault:
    tail = mask_text("\n".join(map(str, fault.tail))).splitlines()  # together: a private key has several lines
    return replace(fault, text=mask_text(fault.text), tail=tail)


def _bounded(steps: dict[int, Metrics]) -> dict[int, Metrics]:
    """Metrics with NaN for what is so large that sums and squares of it are infinite."""
    nan = math.nan
    return {
        step: {name: value if -LARGEST < value < LARGEST else nan for name, value in metrics.items()}
        for step, metrics in steps.items()
    }


def _checkpoints(directory: Path) -> Iterator[SavedCheckpoint]:
    paths = [path for path in directory.glob("global_step_*") if re.fullmatch(r"global_step_\d+", path.name)]
    for path in sorted(paths, key=lambda path: int(path.name.rpartition("_")[2])):
        step = int(path.name.rpartition("_")[2])
        try:
            yield _checkpoint(path, step)
        except UNREADABLE as error:
            problem = f"{type(error).__name__}: {error}"[:200]
            yield SavedCheckpoint(step, path.name, 0, "unreadable", problem, {})


def _checkpoint(path: Path, step: int) -> SavedCheckpoint:
    """Read state and manifest of a checkpoint; files are compared with it by size, not by checksum."""
    if any(True for _ in path.glob("actor/model_world_size_*")):
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        return SavedCheckpoint(step, path.name, size, "verl", "", {})
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    files = json.loads((path / "manifest.json").read_text(encoding="utf-8"))["files"]
    damaged = [name for name, entry in files.items() if _size(path / name) != entry["bytes"]]
    problem = "" if state.get("healthy", True) else str(state.get("reason", "not healthy"))
    if damaged:
        problem = f"{', '.join(damaged[:3])}{' ...' if damaged[3:] else ''}: not as saved"
    size = sum(max(_size(path / name), 0) for name in files)
    kind = "recovery" if state.get("recovery") else "kept"
    code = state.get("code") if isinstance(state.get("code"), dict) else {}
    return SavedCheckpoint(step, path.name, size, kind, problem, code, "" if problem else _lacks(path, files))


def _lacks(path: Path, files: dict[str, Any]) -> str:
    """Return what a run would miss that resumes from a checkpoint, by the index of its shards."""
    # A reference has no optimizer.
    indices = [path / name for name in files if name.endswith(f"/{SHARDS}") and not name.startswith("reference/")]
    if not indices:
        return "model only"
    return "" if all(b"optimizer." in index.read_bytes() for index in indices) else "no optimizer state"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1

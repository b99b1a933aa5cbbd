"""Reader of a run's directory: from its files it derives how the run ended, its last step, its good checkpoints, and
the command that continues it. No other module does so.

Reads all files that exist, even after a failed run and with damaged files; writes nothing.
"""

import json
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import yaml

from hybridrl.checkpoint.files import faults as damaged_files
from hybridrl.checkpoint.store import (
    STATE,
    Checkpoint,
    holder,
    is_verl,
    lacks,
    lineage,
    list_checkpoints,
    step_directories,
    step_number,
)
from hybridrl.config.files import SHARDS, read_mapping
from hybridrl.plugins import load
from hybridrl.tracking.console import warn
from hybridrl.tracking.faults import FINISHED, RESTART, STOPPED, Fault, last_run, read_faults
from hybridrl.tracking.records import records_of
from hybridrl.tracking.report import Metrics, held_diagnoses, read_metrics
from hybridrl.tracking.sink import LOSSES, REWARD, is_validation_score

T = TypeVar("T")
UNREADABLE = (OSError, ValueError, TypeError, AttributeError, KeyError, OverflowError, yaml.YAMLError, RecursionError)
ACTORS = "actor_rollout_ref"
CONFIG = "config.yaml"
PLACEMENT = "placement.json"
SHOWN = 3  # damaged files of a checkpoint


@dataclass(frozen=True)
class SavedCheckpoint:
    """A `global_step_N`, by its files. `kind` is kept, recovery, verl or unreadable. `damaged` has a line per file that
    differs from its saved state. `lacks`: missing parts that prevent resuming; `misses`: missing optional parts."""

    step: int
    path: Path
    kind: str
    damaged: list[str]
    state: dict[str, Any]
    lacks: str = ""
    misses: str = ""
    current: bool = False  # whether it led to the newest one, so that no run went back to a step before it

    @property
    def unhealthy(self) -> str:
        """The reason why it was unhealthy when it was saved; empty if it was healthy."""
        return "" if self.state.get("healthy", True) else str(self.state.get("reason", "no reason was recorded"))

    @property
    def problem(self) -> str:
        """Its damage, as far as its files were compared, or else its health problem; empty if there is none."""
        omitted = " ..." * (len(self.damaged) > SHOWN)
        return f"{', '.join(self.damaged[:SHOWN])}{omitted}" if self.damaged else self.unhealthy

    @property
    def has_model(self) -> bool:
        return (self.path / "actor").is_dir() and not self.lacks.startswith("no weights")

    @property
    def resumable(self) -> bool:
        return not self.problem and not self.lacks

    @property
    def size(self) -> int:
        return sum(file.st_size for file in self._files())

    @property
    def written(self) -> float:
        """The time of its last written file; 0 without files."""
        return max((file.st_mtime for file in self._files()), default=0.0)

    def _files(self) -> Iterator[os.stat_result]:
        """Yield the status of each file; a running run may delete files at the same time."""
        for place, _, names in os.walk(self.path):
            for name in names:
                with suppress(OSError):
                    yield os.stat(f"{place}/{name}")


class RunDirectory:
    """The files of a finished or running run; each file is read when it is first needed. `note` is called with a
    message per unreadable file. With `checksums` all bytes of checkpoints are read, else their sizes are compared."""

    def __init__(self, path: Path, note: Callable[[str, str], object] = warn, *, checksums: bool = False) -> None:
        self.path, self.note, self._checksums = path, note, checksums

    def attempt(self, what: str, read: Callable[[], T], otherwise: T) -> T:
        """Return the result of `read`; if it raises because of a file's contents, note that and return `otherwise`."""
        try:
            return read()
        except UNREADABLE as error:
            reason = next(iter(str(error).splitlines()), "")[:200]
            self.note(f"{what} cannot be read: {type(error).__name__}: {reason}", "unreadable")
            return otherwise

    @cached_property
    def user(self) -> str:
        """The process that uses the directory now."""
        return holder(self.path)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The run's configuration; empty if there is no readable one."""
        file = self.path / CONFIG
        return self.attempt(CONFIG, lambda: read_mapping(file) if file.exists() else {}, {})

    @property
    def trainer(self) -> dict[str, Any]:
        section = self.config.get("trainer")
        return section if isinstance(section, dict) else {}

    @cached_property
    def placement(self) -> list[tuple[str, str, str]]:
        """Machine, device and processes of the run's last start, if it joined a Ray."""
        file = self.path / PLACEMENT
        return self.attempt(PLACEMENT, lambda: _places(json.loads(file.read_text())) if file.exists() else [], [])

    @property
    def supervised(self) -> bool:
        """Whether it is a supervised run, by its configuration, or without one by its logged metrics."""
        return ACTORS not in self.config if self.config else any("train/loss" in line for line in self.steps.values())

    @property
    def command(self) -> str:
        """The command of hybridrl that such a run has."""
        pairs = self.config.get("pairs")
        scores = isinstance(pairs, dict) and pairs.get("center") is not None
        return ("rm" if scores else "sft") if self.supervised else "train"

    @cached_property
    def steps(self) -> dict[int, Metrics]:
        """The metrics by step."""
        return self.attempt("metrics.jsonl", lambda: read_metrics(self.path, self.note), {})

    @property
    def last_step(self) -> int:
        return max(self.steps, default=0)

    @cached_property
    def trained(self) -> dict[int, Metrics]:
        """The metrics of training steps only."""
        return {step: metrics for step, metrics in self.steps.items() if step > 0}

    @cached_property
    def held(self) -> dict[str, list[int]]:
        """The steps in which each diagnosis held, by code."""
        return held_diagnoses(self.steps)

    @cached_property
    def faults(self) -> list[Fault]:
        """The records of all runs of the directory, in order."""
        return self.attempt("faults.jsonl", lambda: read_faults(self.path), [])

    @property
    def last_run(self) -> list[Fault]:
        """The records of the last run, without those of earlier runs in the same directory."""
        return last_run(self.faults) or self.faults

    @property
    def end(self) -> Fault | None:
        """The record of the last run's end; None: it is running, or it was killed."""
        last = self.last_run
        return last[-1] if last and last[-1].end else None

    @property
    def failures(self) -> list[Fault]:
        """The restarts of the last run and its failure, after those of the failed runs before it, the likely causes."""
        failed: list[Fault] = []
        for fault in self.faults:
            if fault.end or fault.code == RESTART:
                failed = [] if fault.code in (FINISHED, STOPPED) else [*failed, fault]
        return failed

    @property
    def began(self) -> float:
        return self.last_run[0].at.timestamp() if self.last_run else 0.0

    @property
    def logged(self) -> float:
        """The time at which the last run last logged metrics; 0 if all metrics are from earlier runs."""
        metrics = self.path / "metrics.jsonl"
        logged = metrics.stat().st_mtime if metrics.is_file() else 0.0
        return logged if logged > self.began - 1 else 0.0  # a file's clock is coarse

    @property
    def place(self) -> str:
        """The step at which the last run is or ended, as a part of a sentence."""
        if self.end is None:
            return f"after step {self.last_step}" if self.logged and self.last_step else "before its first step"
        return f"in step {self.end.step}" if self.end.step else "before its first step"

    @property
    def crashed(self) -> bool:
        if self.end is not None:
            return self.end.code not in (FINISHED, STOPPED)
        return bool(self.faults) and not self.user

    @property
    def ending(self) -> str:
        """The end of the run, or that it is running, as a part of a sentence."""
        if self.end is None:
            left = f"killed {self.place}" if self.faults else "no record of how it ended"
            return "running" if self.user else left
        if self.end.code == FINISHED:
            return "ended normally"
        return (
            f"stopped on request {self.place}" if self.end.code == STOPPED else f"failed {self.place} [{self.end.code}]"
        )

    @cached_property
    def checkpoints(self) -> list[SavedCheckpoint]:
        """Every checkpoint, intact or not, by step."""
        return self.attempt("its checkpoints", self._list, [])

    def _list(self) -> list[SavedCheckpoint]:
        listed = list_checkpoints(self.path)
        published, current = {saved.path: saved for saved in listed}, {saved.path for saved in lineage(listed)}
        return [self._checkpoint(path, published.get(path), path in current) for path in step_directories(self.path)]

    def _checkpoint(self, path: Path, saved: Checkpoint | None, current: bool) -> SavedCheckpoint:
        step = step_number(path)
        if is_verl(path):
            faults = load("verl.checkpoint").verl_faults(path) if self._checksums else []
            return SavedCheckpoint(step, path, "verl", faults, {})
        damaged = damaged_files(path, checksums=self._checksums)
        if saved is None:
            return SavedCheckpoint(step, path, "unreadable", damaged or [f"{STATE}: not the state of a checkpoint"], {})
        kind = "recovery" if saved.state["recovery"] else "kept"
        notes = self.attempt(path.name, lambda: (lacks(path), _misses(path)), ("its index of shards", ""))
        return SavedCheckpoint(step, path, kind, damaged, saved.state, *notes, current)

    @property
    def saved(self) -> SavedCheckpoint | None:
        """The last published checkpoint, among those that were saved as healthy."""
        healthy = (checkpoint for checkpoint in self.checkpoints if checkpoint.state and not checkpoint.unhealthy)
        return max(healthy, key=lambda checkpoint: checkpoint.state["published"], default=None)

    @property
    def newest(self) -> SavedCheckpoint | None:
        """The checkpoint for resume_mode=auto: one of verl's only if there is no good one of hybridrl's."""
        good = [one for one in self.checkpoints if one.current and one.resumable]
        return next(reversed(good or [one for one in self.checkpoints if one.kind == "verl" and not one.problem]), None)

    def scores(self) -> tuple[str, int, dict[int, float]]:
        """Return the metric that compares checkpoints, -1 if less of it is better, and its values by step. It is the
        metric of keep_best_ckpt, else a logged validation score, loss or reward; its name is empty if there is none."""
        metrics = {saved.step: saved.state["metrics"] for saved in self.checkpoints if saved.state}
        names = sorted({name for values in metrics.values() for name in values})
        best = str(self.trainer.get("keep_best_ckpt") or "")
        candidates = [best.removeprefix("-"), *filter(is_validation_score, names), *reversed(LOSSES), *REWARD]
        name = next((name for name in candidates if name in names), "")
        less = name in LOSSES or (best.startswith("-") and name == best[1:])
        return name, -1 if less else 1, {step: values[name] for step, values in metrics.items() if name in values}

    def samples(self, kind: str) -> dict[int, Path]:
        """Return the files of samples by step: `rollouts`, of training, or `samples`, of validations."""
        return self.attempt(f"{kind}/", lambda: records_of(self.path, kind), {})

    def resume_command(self, change: str = "") -> str:
        """Return the command that continues the run, from its last checkpoint if there is one, with a change."""
        if not self.config:
            return "hybridrl train key=value ..., as before"
        words = [f"hybridrl {self.command} -cp {shlex.quote(str(self.path))} -cn config"]
        if self.saved and self.trainer.get("resume_mode") != "auto":
            words.append("trainer.resume_mode=auto")
        return " ".join([*words, change]).strip()


def _misses(path: Path) -> str:
    indices = [index for index in path.glob(f"*/{SHARDS}") if index.parent.name in ("actor", "critic")]
    return "" if all(b"optimizer." in index.read_bytes() for index in indices) else "no optimizer state"


def _places(machines: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    rows = []
    for number, machine in enumerate(machines):
        name = f"machine {number} on {machine['node']}"
        rows += [(name, f"device {index}", " ".join(names)) for index, names in enumerate(machine["devices"])]
        rows += [(name, "", " ".join(machine["others"]))] * bool(machine["others"])
    return rows

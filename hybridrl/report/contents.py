"""A run's directory for the page, with notes on missing and damaged files. And its configuration next to the shipped
one: the keys that differ, with their source and meaning."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from hybridrl.config import ConfigError
from hybridrl.config.compose import CONF, shipped
from hybridrl.config.findings import show
from hybridrl.config.load import key_meanings
from hybridrl.config.values import MISSING, leaves
from hybridrl.runs.directory import CONFIG, UNREADABLE, RunDirectory
from hybridrl.tracking.faults import BEGUN, Fault, last_lines, of_last_process, read_end
from hybridrl.tracking.records import record_files
from hybridrl.tracking.report import Metrics
from hybridrl.tracking.secrets import mask_text, mask_values, remember
from hybridrl.tracking.sink import PHASES, STEP_SECONDS, line_seconds, phase_seconds

LARGEST = 1e100  # a larger number is not a measurement
LOG_BYTES, LOG_LINES, LOG_SHOWN = 1 << 16, 60, 12_000  # bytes read at the end of a log; lines and characters shown
NO_METRICS = "metrics.jsonl has no steps: no curves"
TRACEBACK = re.compile(r"^(.*?)Traceback \(most recent call last\):", re.MULTILINE)


@dataclass(frozen=True)
class LogExcerpt:
    """The end of a log, or the traceback in it."""

    name: str
    text: str
    is_traceback: bool


class Contents(RunDirectory):
    """Everything of a run except its samples, with secrets masked. `notes` list missing and unreadable files; the class
    never raises for the state of a directory."""

    def __init__(self, path: Path, name: str = "") -> None:
        self.notes: list[str] = []
        super().__init__(path, lambda text, code: self.notes.append(text))
        self.name = name or path.resolve().name
        remember(RunDirectory(path, lambda *_: None).config)
        self.training, self.validation = self.samples("rollouts"), self.samples("samples")
        if not any(path.glob("rollouts")) and self.training == self.validation:
            self.validation = {}  # the directory holds files of samples itself
        self.notes += _absences(self)

    @cached_property
    def config(self) -> dict[str, Any]:
        return self.attempt(CONFIG, lambda: mask_values(super(Contents, self).config), {})

    @cached_property
    def config_text(self) -> str:
        return yaml.safe_dump(self.config, sort_keys=False, allow_unicode=True) if self.config else ""

    @cached_property
    def faults(self) -> list[Fault]:
        # The lines of a tail are masked together: a private key has several.
        return [
            replace(fault, text=mask_text(fault.text), tail=mask_text("\n".join(map(str, fault.tail))).splitlines())
            for fault in super().faults
        ]

    @cached_property
    def steps(self) -> dict[int, Metrics]:
        """The metrics by step, with NaN for values whose sums and squares would be infinite."""
        steps, nan = super().steps, math.nan
        if read_end(self.path / "metrics.jsonl", 1) not in (b"\n", b""):
            self.notes.append("the last line of metrics.jsonl is not complete, and is left out")
        return {
            step: {name: value if -LARGEST < value < LARGEST else nan for name, value in metrics.items()}
            for step, metrics in steps.items()
        }

    def take_steps(self, steps: dict[int, Metrics]) -> None:
        """Use these metrics instead of those of the directory."""
        for name in ("trained", "held", "resumes", "phases"):
            vars(self).pop(name, None)
        self.steps = steps

    @property
    def title(self) -> str:
        """Model, algorithm and rows of the run; without a configuration, its name."""
        values = leaves(self.config)
        model = str(values.get("model.path" if self.supervised else "actor_rollout_ref.model.path") or "")
        places = [part for part in Path(model).parts if not re.fullmatch(r"huggingface|actor|global_step_\d+", part)]
        files = values.get("data.train_files") or []
        first, *others = [Path(str(file)).name for file in (files if isinstance(files, list) else [files])] or [""]
        rows = f"{first} and {len(others)} more" if others else first
        estimator = self.command if self.supervised else str(values.get("algorithm.adv_estimator") or "")
        return " · ".join(filter(None, [*places[-1:], estimator, rows])) if self.config else self.name

    @property
    def started(self) -> str:
        """The time when the run began, before it was resumed. An earlier run in the same directory does not count."""
        begins = [fault.time for fault in self.faults if fault.code == BEGUN]
        return begins[-1 - min(len(self.resumes), len(begins) - 1)] if begins else ""

    @cached_property
    def resumes(self) -> list[int]:
        """The first step after each resumption of the run."""
        return [step for step, metrics in self.trained.items() if "timing_s/start_up" in metrics]

    @property
    def seconds(self) -> float:
        return sum(value for metrics in self.steps.values() if math.isfinite(value := line_seconds(metrics)))

    @cached_property
    def phases(self) -> dict[int, dict[str, float]]:
        """Seconds by phase, for every timed training step; "other" is the time outside all timers."""
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
        """Responses per training step according to the configuration; 0 if unknown."""
        try:
            rows = int(self.config["data"]["train_batch_size"])
            rollout = self.config.get("actor_rollout_ref", {}).get("rollout", {})
            return rows * int(rollout.get("n", 1))
        except UNREADABLE:
            return 0


def _absences(contents: Contents) -> list[str]:
    """List the missing parts of a page, with the reason if it is known."""
    if not contents.path.is_dir():
        return [f"{contents.path} is not a directory"]
    notes = []
    if not contents.steps:
        notes.append(NO_METRICS)
    elif not contents.trained:
        notes.append("no step was finished: no curves of training")
    if not contents.training:
        notes.append("no training samples (trainer.rollout_data_dir is null, or the files are verl's and elsewhere)")
    if not contents.validation:
        notes.append("no validation samples: the run did not validate, or trainer.validation_data_dir is null")
    if not (contents.path / CONFIG).exists():
        notes.append("no config.yaml: the configuration and what differs from the default are not known")
    if not contents.checkpoints:
        notes.append("no checkpoint was saved")
    return notes


def is_run(directory: Path) -> bool:
    """Whether a directory has any file that a page shows."""
    has_files = any((directory / name).exists() for name in ("metrics.jsonl", "faults.jsonl", "config.yaml"))
    places = (directory, directory / "rollouts", directory / "samples")
    return has_files or any(record_files(place) for place in places) or any(directory.glob("global_step_*"))


def log_excerpts(contents: Contents) -> list[LogExcerpt]:
    """Return tracebacks of a run that failed, the oldest first, then the ends of all logs with text."""
    logs = [path for path in contents.path.glob("logs/*") if path.is_file()]
    logs.sort(key=lambda path: path.stat().st_mtime)
    ends = [(path.name, mask_text(last_lines(path, LOG_BYTES))) for path in logs]
    tracebacks = []
    for name, text in ends if contents.crashed else ():
        last = of_last_process(text) if (contents.path / "logs" / name).stat().st_mtime > contents.began - 1 else ""
        if places := list(TRACEBACK.finditer(last)):
            lines = last[places[-1].start() :].splitlines()
            tracebacks.append(LogExcerpt(name, "\n".join(lines[:LOG_LINES])[:LOG_SHOWN], True))
    tails = [
        LogExcerpt(name, "\n".join(text.splitlines()[-LOG_LINES:])[-LOG_SHOWN:], False)
        for name, text in ends
        if text.strip()
    ]
    return [*tracebacks, *tails]


@dataclass(frozen=True)
class Setting:
    """A key that differs from the default; an empty `source` means that it was set."""

    key: str
    value: str
    default: str
    source: str
    meaning: str


def settings(contents: Contents) -> list[Setting]:
    """Return the keys that differ from the shipped configuration: set ones first, then derived ones. Keys that only
    follow another key are left out."""
    if not contents.config:
        return []
    name = "sft_trainer" if contents.supervised else "ppo_trainer"
    try:
        usual, meanings = shipped(name), key_meanings(CONF / f"{name}.yaml")
    except (ConfigError, OSError):
        return []
    values, defaults = leaves(contents.config), leaves(usual.values)
    rows = []
    for key, value in values.items():
        default, followed = defaults.get(key, MISSING), usual.follows.get(key)
        if value in (default, [default]) or (value in ([], {}) and default is None):
            continue
        if key.startswith("critic.") and values.get("critic.enable") is False:
            continue
        if followed in values and values[followed] == value:
            continue
        source = "set, or derived for model and machine" if default is None else ""
        if key not in defaults:
            source = "no key of this version"
        expected = f"as {followed}" if followed else "must be set" if default == MISSING else show(default)
        rows.append(Setting(key, show(value), expected, source, meanings.get(key, "")))
    return sorted(rows, key=lambda row: bool(row.source))


def differing_keys(runs: Sequence[Contents]) -> list[tuple[str, list[str]]]:
    """Return the keys in which runs differ, with the value of each run. Directories are left out."""
    flat = [leaves(run.config) for run in runs]
    keys = dict.fromkeys(key for values in flat for key in values)
    rows = []
    for key in keys:
        values: list[Any] = [values_of.get(key, MISSING) for values_of in flat]
        if any(value != values[0] for value in values[1:]) and not key.endswith("_dir"):
            rows.append((key, ["-" if value == MISSING else show(value) for value in values]))
    return rows


def environment(contents: Contents) -> dict[str, str]:
    """Return versions, commit and devices from the last checkpoint and the configuration."""
    code = contents.checkpoints[-1].state.get("code") if contents.checkpoints else None
    versions = {str(name): str(value) for name, value in code.items()} if isinstance(code, dict) else {}
    settings = {key: contents.trainer.get(key) for key in ("device", "nnodes", "n_gpus_per_node", "seed")}
    return versions | {f"trainer.{key}": str(value) for key, value in settings.items() if value is not None}

"""The interface of a sink, a class with `log(step, metrics)`; the main metrics, and a step's timers; and the glossary
of metrics from `metrics.yaml`: meaning, healthy values, and fixes."""

import difflib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import yaml

# Phase of a step -> its `timing_s/` timers. The timers of one line do not overlap.
PHASES = {
    "start-up": ("start_up",),
    "rollout": ("gen", "gen_max"),
    "reward": ("reward",),
    "log-probs": ("old_log_prob", "ref", "values"),
    "update": ("adv", "update_actor", "update_critic"),
    "switch": ("switch", "update_weights"),
    "validation": ("testing",),
    "saving": ("save_checkpoint",),
}
PHASE_OF = {timer: phase for phase, timers in PHASES.items() for timer in timers}
STEP_SECONDS = "timing_s/step"
REWARD = ("critic/rewards/mean", "critic/score/mean")  # the first logged one is shown
RESPONSE_LENGTH = "response_length/mean"
LOSSES = ("train/loss", "val/loss")


@dataclass(frozen=True)
class SampleRow:
    """One validation sample as shown to the user."""

    prompt: str
    response: str
    ground_truth: str
    score: float


class Sink:
    """A destination of metrics; a sink overrides the methods that it supports, at least `log`."""

    offline: ClassVar[str] = ""  # place of records while a tracker cannot be reached, and the command to upload

    def log(self, step: int, metrics: dict[str, float]) -> None:
        raise NotImplementedError

    def samples(self, step: int, rows: list[SampleRow]) -> None:
        return

    def state_dict(self) -> dict[str, Any]:
        """Return the state with which a resumed process continues in the same place. A checkpoint may outlive a power
        failure, so written files have reached the disk when this returns."""
        return {}

    def close(self) -> None:
        return


class Activity:
    """The present work of the run: `watcher` is called with each change."""

    watcher: ClassVar[Callable[[str], None] | None] = None

    @classmethod
    def is_now(cls, text: str) -> None:
        if cls.watcher is not None:
            cls.watcher(text)


class Stopwatch:
    """Seconds by name, logged once per step: `with watch("gen"): ...` adds to `timing_s/gen`; shown by `Activity`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._logged: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        if name in PHASE_OF:
            Activity.is_now(PHASE_OF[name])
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

    def log(self, metrics: dict[str, float]) -> None:
        """Add metrics of what was timed."""
        self._logged |= metrics

    def take(self) -> dict[str, float]:
        """Return all seconds since the last call, and what was logged, as metrics."""
        taken, logged, self._seconds, self._logged = self._seconds, self._logged, {}, {}
        return {f"timing_s/{name}": seconds for name, seconds in taken.items()} | logged


def is_validation_score(name: str) -> bool:
    """Whether the name is `val-core/<data_source>/<acc|reward>/mean@n`; a data source may contain slashes."""
    return name.startswith("val-core/") and name.rsplit("/", 1)[1].startswith("mean@")


def phase_seconds(metrics: dict[str, float]) -> dict[str, float]:
    """Return the seconds of each phase with a timer among the metrics."""
    timers = {
        phase: [metrics[f"timing_s/{name}"] for name in names if f"timing_s/{name}" in metrics]
        for phase, names in PHASES.items()
    }
    return {phase: sum(seconds) for phase, seconds in timers.items() if seconds}


def line_seconds(metrics: dict[str, float]) -> float:
    """Return the seconds of one log call; without a step (the first validation) those of its phases."""
    return max(metrics.get(STEP_SECONDS, 0.0), sum(phase_seconds(metrics).values()))


# -- the glossary ------------------------------------------------------------------------------------------------------


REGISTRY = Path(__file__).parent / "metrics.yaml"


@dataclass(frozen=True)
class MetricEntry:
    """A metric, or several of one kind: in the name, {a,b} stands for a or b, and <x> for any text."""

    name: str
    meaning: str
    healthy: str = ""
    otherwise: str = ""
    diagnoses: tuple[str, ...] = ()  # codes of the rules in docs/health.md that read it

    def matches(self, name: str) -> bool:
        return re.fullmatch(_pattern(self.name), name) is not None


@dataclass(frozen=True)
class MetricSection:
    """Entries that belong together, under a title."""

    title: str
    text: str
    entries: tuple[MetricEntry, ...]


@cache
def sections() -> tuple[MetricSection, ...]:
    """Return all entries in the order of the file."""
    return tuple(
        MetricSection(
            section["title"],
            section.get("text", ""),
            tuple(
                MetricEntry(name, **entry | {"diagnoses": tuple(entry.get("diagnoses", ()))})
                for name, entry in section["metrics"].items()
            ),
        )
        for section in yaml.safe_load(REGISTRY.read_text(encoding="utf-8"))
    )


def entries() -> Iterator[MetricEntry]:
    for section in sections():
        yield from section.entries


def entry_of(name: str) -> MetricEntry | None:
    """Return the entry of a metric, None if there is none. Of several, the one with the most literal letters."""
    matching = (entry for entry in entries() if entry.matches(name))
    return max(matching, key=lambda entry: len(re.sub("<[^>]*>", "", entry.name)), default=None)


def nearest_metrics(name: str) -> list[str]:
    """Return the names of entries most similar to `name`."""
    return difflib.get_close_matches(name, [entry.name for entry in entries()], n=3, cutoff=0.4)


@cache
def _pattern(name: str) -> str:
    """Convert the name of an entry to a regular expression."""
    parts = re.split(r"(<[^>]*>|[{},])", name)
    groups = {"{": "(?:", "}": ")", ",": "|"}
    return "".join(groups.get(part) or (".+" if part.startswith("<") else re.escape(part)) for part in parts)

"""The interface of a sink, one class with `log(step, metrics)`; the metrics that are shown, and a step's timers; what
each metric means, its look in a run that learns, and what to do otherwise: `metrics.yaml`, read."""

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
REWARD = ("critic/rewards/mean", "critic/score/mean")  # the first that is logged is shown
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

    offline: ClassVar[str] = ""  # where one of another system records if that cannot be reached, and how to upload it

    def log(self, step: int, metrics: dict[str, float]) -> None:
        raise NotImplementedError

    def samples(self, step: int, rows: list[SampleRow]) -> None:
        return

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed process needs to continue in the same place. A checkpoint may outlive a power failure,
        so written files have reached the disk when this returns."""
        return {}

    def close(self) -> None:
        return


class Activity:
    """The present work of the run, for whoever shows it: `watcher` is called with each change of it."""

    watcher: ClassVar[Callable[[str], None] | None] = None

    @classmethod
    def is_now(cls, text: str) -> None:
        if cls.watcher is not None:
            cls.watcher(text)


class Stopwatch:
    """Seconds by name, logged once per step: `with watch("gen"): ...` adds to `timing_s/gen`; shown by `Activity`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        if name in PHASE_OF:
            Activity.is_now(PHASE_OF[name])
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

    def take(self) -> dict[str, float]:
        """Return all seconds since the last call, as metrics."""
        taken, self._seconds = self._seconds, {}
        return {f"timing_s/{name}": seconds for name, seconds in taken.items()}


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
    """Return the seconds that one log call accounts for; without a step (the first validation) it has only phases."""
    return max(metrics.get(STEP_SECONDS, 0.0), sum(phase_seconds(metrics).values()))


# -- the glossary ------------------------------------------------------------------------------------------------------


REGISTRY = Path(__file__).parent / "metrics.yaml"


@dataclass(frozen=True)
class MetricEntry:
    """One metric, or several of one kind: in its name {a,b} stands for a or b, and <x> for any text."""

    name: str
    meaning: str
    healthy: str = ""
    otherwise: str = ""
    diagnoses: tuple[str, ...] = ()  # codes of docs/health.md that read it

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
    """Return all entries, in the order in which they are read."""
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
    """Return the entry of a metric, of several the one with the most letters of its own; None if there is none."""
    matching = (entry for entry in entries() if entry.matches(name))
    return max(matching, key=lambda entry: len(re.sub("<[^>]*>", "", entry.name)), default=None)


def nearest_metrics(name: str) -> list[str]:
    """Return the names of entries that are most like `name`."""
    return difflib.get_close_matches(name, [entry.name for entry in entries()], n=3, cutoff=0.4)


@cache
def _pattern(name: str) -> str:
    """Convert the name of an entry to a regular expression."""
    parts = re.split(r"(<[^>]*>|[{},])", name)
    known = {"{": "(?:", "}": ")", ",": "|"}
    return "".join(known.get(part) or (".+" if part.startswith("<") else re.escape(part)) for part in parts)

"""The meaning of each metric, its look in a run that learns, and what to do otherwise: `metrics.yaml`, read."""

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

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

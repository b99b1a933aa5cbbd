"""verl's keys that are no keys here, and what becomes of them: verl_keys.yaml, read once."""

import functools
import re
from dataclasses import dataclass, field
from fnmatch import translate
from pathlib import Path
from typing import Any, Literal

import yaml

FILE = Path(__file__).with_suffix(".yaml")
KINDS = ("refused", "translated", "ignored")  # in the order in which they are asked


@dataclass(frozen=True, eq=False)
class Entry:
    """One entry of the file, for all keys that its patterns name."""

    kind: Literal["refused", "translated", "ignored"]
    keys: tuple[str, ...]
    why: str = ""
    silent: tuple[Any, ...] = ()
    follows: str | None = None
    sets: dict[str, Any] = field(default_factory=dict)
    pattern: re.Pattern[str] = re.compile("")

    def is_silent(self, value: Any) -> bool:
        """Whether the value changes nothing, so that nothing is said of it."""
        alike = (item == value and isinstance(item, bool) == isinstance(value, bool) for item in self.silent)
        return value is None or value == "" or any(alike)


@dataclass(frozen=True)
class VerlKeys:
    moved: dict[str, str]
    defaults: dict[str, Any]
    entries: tuple[Entry, ...]


@functools.cache
def verl_keys() -> VerlKeys:
    table = yaml.load(FILE.read_text(encoding="utf-8"), yaml.CSafeLoader)
    entries = [_entry(kind, **values) for kind in KINDS for values in table[kind]]
    return VerlKeys(table["moved"], table["defaults"], tuple(entries))


def _entry(kind: Literal["refused", "translated", "ignored"], keys: list[str], **values: Any) -> Entry:
    named = "|".join(translate(form) for key in keys for form in (key, f"{key}.*"))
    values["silent"] = tuple(values.get("silent", ()))
    return Entry(kind, tuple(keys), pattern=re.compile(named), **values)


def entry_of(key: str) -> Entry | None:
    """The entry that judges a key, by its present name."""
    return next((entry for entry in verl_keys().entries if entry.pattern.match(key)), None)


def current_name(key: str) -> str:
    """The present name of a key that carries an old one; any other key unchanged."""
    for old, new in verl_keys().moved.items():
        if key == old or key.startswith(old + "."):
            return current_name(new + key[len(old) :])
    return key

"""Entries of a system's table, each for the keys that its patterns name, and entries that compute from several keys."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from hybridrl.config.findings import show

KINDS = ("rejected", "combined", "translated", "ignored", "otherwise")  # in the order in which they are consulted
SETTING = ("combined", "translated")  # whose keys set others
REJECTING = ("rejected", "otherwise")  # the latter if no other entry names the key


@dataclass(frozen=True, eq=False)
class Entry:
    """The treatment of the keys that some patterns name.

    `silent` values change nothing; `follows` is a key whose value does not either; `when` limits the entry to values
    that match it. `sets` has values by key, with {value} for the entry's own, which `values` may replace, or functions
    that compute one. `drops`: values of keys that count as not set. A `named` entry rejects its keys wherever a command
    names them. `fix` is what to do about a value, given those of all keys; nothing where it is accepted.
    """

    kind: str
    keys: list[str]
    why: str = ""
    silent: list[Any] = field(default_factory=list)
    follows: str = ""
    sets: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    when: str = ""
    named: bool = False
    drops: dict[str, Any] = field(default_factory=dict)
    fix: Callable[[Any, Mapping[str, Any]], str] | None = None

    def names(self, key: str) -> bool:
        """Whether a pattern names the key, or a section that it is in."""
        inside = f"{key}."
        return any(
            fnmatchcase(inside, f"{form}.*") if "*" in form else inside.startswith(f"{form}.") for form in self.keys
        )

    def is_silent(self, value: Any) -> bool:
        """Whether the value changes nothing, so that nothing is reported."""
        alike = (item == value and isinstance(item, bool) == isinstance(value, bool) for item in self.silent)
        return value is None or value == "" or self.silent == ["*"] or any(alike)

    def accepts(self, value: Any, values: Mapping[str, Any]) -> bool:
        """Whether a value says what other keys say."""
        return value == values.get(self.follows) or (self.fix is not None and not self.fix(value, values))

    def concerns(self, value: Any) -> bool:
        return re.search(self.when, str(value)) is not None

    def value_of(self, text: str) -> Any:
        """Return the replacement of a value, if `values` states one."""
        matches = ((re.fullmatch(pattern, text), value) for pattern, value in self.values.items())
        match, value = next(((match, value) for match, value in matches if match), (None, None))
        return match.expand(value) if match and isinstance(value, str) else value

    @property
    def reason(self) -> str:
        """Why, or what is set instead."""
        return self.why or " ".join(f"{name}={show(value)}" for name, value in self.sets.items())


def combined(keys: str, meaning: str, sets: dict[str, Any], **more: Any) -> Entry:
    """An entry of keys that count together, once all are known; a `meaning` where values are computed."""
    return Entry("combined", keys.split(), meaning, sets=sets, **more)


def number(text: Any) -> Any:
    """An integer if it is one, else a float. Raises ValueError."""
    value = float("" if isinstance(text, bool) else text)
    return int(value) if value.is_integer() else value


class Look:
    """The values that an entry's functions compute with: `of(key, usual)`, the number at a key of either system;
    `of.value`, what the entry's first key is set to; `of.size("dt")`, the product of these groups of `when`. `of.read`:
    keys so far."""

    def __init__(self, find: Callable[[str, Any], Any], entry: Entry, values: list[Any]) -> None:
        self._find = find
        self.read: list[str] = []
        self.value = values[0]
        self._match = next(match for value in values if (match := re.search(entry.when, str(value))))

    def __call__(self, key: str, usual: float | None = None) -> Any:
        value = self._find(key, usual)
        self.read += [key] * (key not in self.read)
        try:
            return number(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{key}={show(value)}") from error

    def size(self, groups: str) -> int:
        return math.prod(int(self._match[group] or 1) for group in groups)

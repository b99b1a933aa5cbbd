"""Keys of another system that count together, such as factors of a product: section `combined` of the tables."""

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridrl.config.findings import show
from hybridrl.config.keys import Entry, entry_of, holds, verl_keys

REFERENCE = re.compile(r"\{([\w.]+)\}")
OPERATIONS: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "ceil": lambda one, other: math.ceil(one / other),
    "min": min,
}


def computed(form: Any, look: Callable[[str], Any]) -> Any:
    """A form such as `{a} * {b} // {c}`, with what `look` returns for each name, from left to right; ceil divides and
    rounds up. _ between two forms is between their results. Text without an operation stays text. Raises ValueError
    with the numbers if one is missing."""
    if not isinstance(form, str):
        return form
    if (whole := REFERENCE.fullmatch(form)) is not None:
        return look(whole[1])
    text = REFERENCE.sub(lambda name: show(look(name[1])), form)
    try:
        results = [_result(*part.split()) for part in text.split(" _ ")]
    except (ValueError, ArithmeticError, LookupError) as error:
        raise ValueError(text) from error
    return results[0] if len(results) == 1 else "_".join(map(show, results))


def _result(first: str, *rest: str) -> Any:
    if not rest:
        return first
    result = float(first)
    for operation, number in zip(rest[::2], rest[1::2], strict=True):
        result = OPERATIONS[operation](result, float(number))
    return int(result) if result == int(result) else float(f"{result:.6g}")


@dataclass
class Combination:
    """What the `keys` of one entry set. `reads`: further keys that this translates, but those with an entry of their
    own that does; `failed`: by key, the numbers of a form that is not computed."""

    entry: Entry
    keys: list[str]
    sets: dict[str, Any] = field(default_factory=dict)
    reads: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Written:
    """What a command sets, by the current names of its keys: `values`, of which `own` have this name in the command.
    `around`: what its custom file sets. `known`: the schema's keys. `usual`: the shipped value of one."""

    values: Mapping[str, Any]
    own: set[str]
    around: Mapping[str, Any]
    known: dict[str, Any]
    usual: Callable[[str], Any]

    def combinations(self) -> list[Combination]:
        """Those of the keys that count together, in the table's order. A later one wins, and what the command or its
        file sets by hybridrl's name stays."""
        named: dict[Entry, list[str]] = {}
        for key, value in self.values.items():
            entry = None if holds(self.known, key) else entry_of(key, value)
            if entry and entry.kind == "combined" and entry.concerns(value) and not entry.is_silent(value):
                named.setdefault(entry, []).append(key)
        found = [self._combination(entry, named[entry]) for entry in verl_keys().entries if entry in named]
        chosen: dict[str, Any] = {}
        for one in found:  # of two that set the same, the first says so
            one.sets = {target: value for target, value in one.sets.items() if chosen.get(target, ...) != value}
            for other in found[: found.index(one)]:
                other.sets = {target: value for target, value in other.sets.items() if target not in one.sets}
            chosen |= one.sets
        return found

    def _combination(self, entry: Entry, keys: list[str]) -> Combination:
        made = Combination(entry, keys)
        match = next(found for key in keys if (found := re.search(entry.when, str(self.values[key]))))

        def look(name: str) -> Any:
            if name == "value":
                return self.values[keys[0]]
            if name in match.groupdict():
                return int(match[name] or 1)
            if name in self.values and not holds(self.known, name) and name not in (*keys, *made.reads):
                read = entry_of(name, self.values[name])
                made.reads += [name] * (read is None or read.kind != "combined")
            places = (self.values, self.around, entry.usual)
            value = next((place[name] for place in places if place.get(name) is not None), None)
            if value is None:
                value = self.usual(name) if name in self.known else name
            return value

        for target, form in entry.sets.items():
            if self._stays(target, entry.drops.get(target)):
                continue
            try:
                made.sets[target] = computed(form, look)
            except ValueError as error:
                made.failed[target] = str(error)
        return made

    def _stays(self, target: str, dropped: Any) -> bool:
        """Whether the command, or its file, sets a key by hybridrl's name, and not to a value that counts as none."""
        if target in self.own:
            return self.values[target] not in (None, dropped)
        there = self.around.get(target)  # a file has all keys of the shipped one that it lists
        return there not in (None, dropped) and there != self.usual(target)

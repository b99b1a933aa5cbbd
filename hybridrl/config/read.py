"""Plain nested values -> one typed configuration. Says of each value that does not fit what was expected.

Knows types and their rules; not where the values came from.
"""

import dataclasses
import math
import os
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, Literal, TypeVar, cast, get_args, get_origin

from hybridrl.config.names import hints
from hybridrl.config.values import Absent, Means, Rule

T = TypeVar("T")

MISSING = "???"  # stands where a key has no default and must be set
SWITCH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
EXPECTED = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


class Misfit(ValueError):
    """A value that its type does not take; the message says what was expected."""


class Absence(Misfit):
    """A value that is sound but names what is not on this machine."""

    def __init__(self, fault: str, value: Any) -> None:
        super().__init__(fault)
        self.value = value


@dataclass(frozen=True)
class Plain:
    """Nested plain values; for each key that takes its value from another one, which; what is wrong where that fails.

    A fault without words is that of another key.
    """

    values: dict[str, Any]
    follows: dict[str, str]
    faults: dict[str, str]


@dataclass
class Reading(Generic[T]):
    """A typed configuration, and all that is to be said of the values it was made of.

    Where a value was refused its shipped one stands in, so that the others can be judged. `foreign` are values that the
    schema has no key for; `absent` says of files and directories that are not on this machine.
    """

    config: T
    refused: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    empty: list[str] = field(default_factory=list)
    foreign: dict[str, Any] = field(default_factory=dict)


Usual = Callable[[str], Any]  # from a key to its shipped value


def read(schema: type[T], plain: Plain, usual: Usual, *, elsewhere: bool = False) -> Reading[T]:
    """Read values by their types. `elsewhere`: files and directories may be absent here."""
    reading = Reading(cast(T, None))
    reading.config = _section(schema, plain.values, "", usual, reading, elsewhere)
    reading.refused |= plain.faults
    for said in (reading.refused, reading.absent):
        for key in [key for key in said if plain.follows.get(key) in said]:
            del said[key]  # said of the other
    return reading


def _section(
    schema: type[T], values: Mapping[str, Any], place: str, usual: Usual, reading: Reading, elsewhere: bool
) -> T:
    found: dict[str, Any] = {}
    for name, hint in hints(schema).items():
        key, value = f"{place}{name}", values.get(name, MISSING)
        if not dataclasses.is_dataclass(hint):
            found[name] = _leaf(key, value, hint, usual, reading, elsewhere)
            continue
        if not isinstance(value, Mapping):
            way_out = f"set the keys in it, such as {key}.{next(iter(hints(hint)))}=..."
            reading.refused[key] = f"{key}={show(value)}: is a section; {way_out}"
            value = usual(key)
        found[name] = _section(cast(type, hint), value, f"{key}.", usual, reading, elsewhere)
    for name in [name for name in values if name not in found]:
        reading.foreign |= leaves({name: values[name]}, place)
    return schema(**found)


def _leaf(key: str, value: Any, hint: Any, usual: Usual, reading: Reading, elsewhere: bool) -> Any:
    try:
        if value != MISSING:
            return fit(value, hint)
        reading.refused[key] = f"{key} is not set; add {key}=..."
    except Absence as absence:
        if elsewhere:
            reading.absent[key] = f"{key}={show(value)}: {absence}"
            return absence.value
        reading.refused[key] = f"{key}={show(value)}: {absence}"
    except Misfit as misfit:
        if value == "" and key.startswith("trainer."):  # where and how often: nothing that a step computes
            reading.empty.append(f"{key} is empty (is a shell variable not set?); {show(usual(key))} is taken")
            return fit(usual(key), hint)
        shell = " (a shell variable that was not replaced?)" if str(value).startswith("$") else ""
        reading.refused[key] = f"{key}={show(value)}: {misfit}{shell}"
    shipped = usual(key)
    return shipped if shipped == MISSING else fit(shipped, hint)


def leaves(values: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Nested values by full key; an empty mapping is a value."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = isinstance(value, Mapping) and value
        found |= leaves(value, f"{place}{name}.") if inner else {f"{place}{name}": value}
    return found


def fit(value: Any, hint: Any, or_null: bool = False) -> Any:
    """The value as its type wants it. Raises Misfit, which offers null where `or_null`.

    One value stands for a list of one, null for an empty list or mapping, and nothing at all (`key=`) for null.
    """
    origin, arguments, empty = get_origin(hint), get_args(hint), value is None or value == ""
    if origin is Annotated:
        for rule in (rule for rule in arguments[1:] if isinstance(rule, Means)):
            value = rule.values.get(show(value).lower(), value)
        return _obeying(fit(value, arguments[0], or_null), arguments[1:])
    if origin in (typing.Union, UnionType):
        (inner,) = (item for item in arguments if item is not NoneType)
        return None if empty else fit(value, inner, or_null=True)
    if origin is Literal:
        if not any(type(value) is type(item) and value == item for item in arguments):
            raise Misfit("choose " + " | ".join(map(show, [*arguments, None] if or_null else arguments)))
        return value
    if origin is list:
        items = [] if empty else value if isinstance(value, list) else [value]
        return [fit(item, arguments[0]) for item in items]
    if origin is dict:
        if not empty and not isinstance(value, Mapping):
            raise Misfit("expected names and values: {name: value, ...}")
        return {} if empty else dict(value)
    return _scalar(value, hint, or_null)


def _obeying(value: Any, rules: tuple[Rule, ...]) -> Any:
    for rule in rules:
        try:
            fault = rule.fault(value)
        except OSError as error:  # a name that is too long, a directory that may not be searched
            raise Misfit(f"{error.strerror}; name another path") from error
        if fault is not None:
            raise Absence(fault, value) if isinstance(fault, Absent) else Misfit(fault)
    return value


def _scalar(value: Any, hint: type, or_null: bool) -> Any:
    """Numbers and switches may come as text: environment variables do."""
    if hint is bool and str(value).lower() in SWITCH:
        return SWITCH[str(value).lower()]
    if hint is str and value != "" and isinstance(value, str | int | float):
        return os.path.expanduser(value) if str(value).startswith("~/") else str(value)
    if hint in (int, float) and isinstance(value, str | int | float) and not isinstance(value, bool):
        number = _number(value)
        if hint is float and not math.isnan(number):
            return number
        if hint is int and number.is_integer():
            return value if isinstance(value, int) else int(number)
    raise Misfit(f"expected {EXPECTED[hint]}{' or null' * or_null}")


def _number(text: str | int | float) -> float:
    try:
        return float(text)
    except (ValueError, OverflowError):
        return math.nan


def show(value: Any) -> str:
    """A value as it is written in a command."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {show(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(show, value))}]"
    return {None: "null", True: "true", False: "false"}[value] if isinstance(value, bool | None) else str(value)

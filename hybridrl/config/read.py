"""Plain nested values -> one typed configuration. Says of each value that does not fit what was expected.

Knows types and their rules; not where the values came from.
"""

import dataclasses
import math
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from hybridrl.config.error import Refusals
from hybridrl.config.names import current_name, hints, unknown_key, value_keys
from hybridrl.config.values import Rule

T = TypeVar("T")

MISSING = "???"  # stands where a key has no default and must be set
SWITCH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
EXPECTED = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


class Misfit(ValueError):
    """A value that its type does not take; the message says what was expected."""


@dataclass(frozen=True)
class Plain:
    """Nested plain values, and for each key that takes its value from another one, which."""

    values: dict[str, Any]
    follows: dict[str, str]


def read(schema: type[T], plain: Plain, source: str, wrong: Refusals) -> T:
    """The typed configuration, of use only where nothing is `wrong`. `source` is the file that keys may come from."""
    refused: dict[str, str] = {}
    unknown: list[str] = []
    config = _section(schema, plain.values, "", refused, unknown)
    for key, line in refused.items():
        if plain.follows.get(key) not in refused:
            wrong.add(line)
    known = value_keys(schema)
    for key in unknown:
        new = current_name(key)
        wrong.add(f"{key} in {source} is now {new}; rename it" if new in known else unknown_key(key, known, source))
    return config


def _section(schema: type[T], values: Mapping[str, Any], place: str, refused: dict[str, str], unknown: list[str]) -> T:
    found: dict[str, Any] = {}
    for name, hint in hints(schema).items():
        key, value = f"{place}{name}", values.get(name, MISSING)
        if not dataclasses.is_dataclass(hint):
            found[name] = _leaf(key, value, hint, refused)
        elif isinstance(value, Mapping):
            found[name] = _section(typing.cast(type, hint), value, f"{key}.", refused, unknown)
        else:
            found[name] = None
            way_out = f"set the keys in it, such as {key}.{next(iter(hints(hint)))}=..."
            refused[key] = f"{key}={show(value)}: is a section; {way_out}"
    for name in [name for name in values if name not in found]:
        unknown.extend(_leaves(f"{place}{name}", values[name]))
    return schema(**found)


def _leaf(key: str, value: Any, hint: Any, refused: dict[str, str]) -> Any:
    try:
        if value != MISSING:
            return fit(value, hint)
        refused[key] = f"{key} is not set; add {key}=..."
    except Misfit as misfit:
        refused[key] = f"{key}={show(value)}: {misfit}"
    return None


def _leaves(key: str, value: Any) -> list[str]:
    if isinstance(value, Mapping) and value:
        return [leaf for name, inner in value.items() for leaf in _leaves(f"{key}.{name}", inner)]
    return [key]


def fit(value: Any, hint: Any, or_null: bool = False) -> Any:
    """The value as its type wants it. Raises Misfit, which offers null where `or_null`.

    One value stands for a list of one, null for an empty list or mapping, and nothing at all (`key=`) for null.
    """
    origin, arguments, empty = get_origin(hint), get_args(hint), value is None or value == ""
    if origin is Annotated:
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
        if (fault := rule.fault(value)) is not None:
            raise Misfit(fault)
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

"""Key names: those of the schema, and the nearest valid ones to a mistyped one."""

import dataclasses
import difflib
import functools
import typing
from typing import Any

from hybridrl.runs import plugins


@functools.cache
def hints(section: type) -> dict[str, Any]:
    """The types of a section's keys, with their rules."""
    return typing.get_type_hints(section, include_extras=True)


@functools.cache
def tree(section: type) -> dict[str, Any]:
    """Every key with its full name and its type: the sections, and the keys in them."""
    keys: dict[str, Any] = {}
    for name, hint in hints(section).items():
        keys[name] = hint
        if dataclasses.is_dataclass(hint):
            keys |= {f"{name}.{inner}": inner_hint for inner, inner_hint in tree(typing.cast(type, hint)).items()}
    return keys


def value_keys(section: type) -> list[str]:
    """Every key that takes a value."""
    return [key for key, hint in tree(section).items() if not dataclasses.is_dataclass(hint)]


def holds(known: dict[str, Any], key: str) -> bool:
    """Whether a key is in the schema, or in a mapping of it, which takes any names; `known` as `tree` returns it."""
    parts = key.split(".")
    above = (known.get(".".join(parts[:count])) for count in range(1, len(parts)))
    return key in known or any(typing.get_origin(hint) is dict for hint in above)


def nearest(key: str, known: list[str], count: int = 3) -> list[str]:
    """The valid keys most like a mistyped one, best first; none if nothing is similar.

    Half of the likeness is that of the last part, half that of as many last parts as were written (or all); long
    beginnings count little.
    """

    def ratio(one: str, other: str) -> float:
        return difflib.SequenceMatcher(None, one, other).ratio()

    score: dict[str, float] = {}
    for name in known:
        last, wanted = name.rsplit(".", 1)[-1], key.rsplit(".", 1)[-1]
        tail = ".".join(name.split(".")[-(key.count(".") + 1) :])
        alike = 0.5 * ratio(wanted, last) + 0.5 * max(ratio(key, name), ratio(key, tail))
        score[name] = max(alike, 0.7 if len(wanted) > 2 and wanted in last else 0)
    least = max(0.6, max(score.values()) - 0.15)
    return sorted((name for name in known if score[name] > least), key=lambda name: -score[name])[:count]


def nearest_keys(key: str, schema: type) -> str:
    """The fix for an unknown key: the valid keys that may have been meant."""
    known, translation = value_keys(schema), plugins.load("translation")
    if (meant := translation.trl_names.get(key)) in known:
        return f"TRL's {key} is {meant} here"
    names = nearest(translation.current_name(key), known)
    return f"nearest: {', '.join(names)}" if names else "--help all lists all keys"

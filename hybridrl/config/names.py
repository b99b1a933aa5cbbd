"""Key names: the tree of valid ones, and the nearest valid ones to a mistyped one."""

import dataclasses
import difflib
import functools
import typing
from typing import Any

from hybridrl.config.verl_keys import current_name


@functools.cache
def hints(section: type) -> dict[str, Any]:
    """The types of a section's keys, rules included."""
    return typing.get_type_hints(section, include_extras=True)


def tree(section: type, prefix: str = "") -> dict[str, Any]:
    """Every key with its full name and its type: the sections, and the keys in them."""
    found: dict[str, Any] = {}
    for name, hint in hints(section).items():
        found[prefix + name] = hint
        if dataclasses.is_dataclass(hint):
            found |= tree(typing.cast(type, hint), f"{prefix}{name}.")
    return found


def value_keys(section: type) -> list[str]:
    """Every key that takes a value."""
    return [key for key, hint in tree(section).items() if not dataclasses.is_dataclass(hint)]


def holds(known: dict[str, Any], key: str) -> bool:
    """Whether a key is one of ours, or lies in one that takes any names and values; `known` as `tree` returns it."""
    parts = key.split(".")
    above = (".".join(parts[:count]) for count in range(1, len(parts)))
    return key in known or any(typing.get_origin(known.get(name)) is dict for name in above)


def unknown_key(key: str, known: list[str], source: str = "") -> str:
    """The refusal of a key, with the valid ones that may have been meant."""
    names = nearest(current_name(key), known)
    way_out = f"nearest: {', '.join(names)}" if names else "--help lists all keys"
    return f"unknown key {key}{f' in {source}' if source else ''}; {way_out}"


def nearest(key: str, known: list[str], count: int = 3) -> list[str]:
    """The valid keys most like a mistyped one, best first; none where nothing is alike."""
    score = {name: _likeness(key, name) for name in known}
    least = max(0.6, max(score.values()) - 0.15)
    return sorted((name for name in known if score[name] > least), key=lambda name: -score[name])[:count]


def _likeness(key: str, name: str) -> float:
    """Half by the last part, half by as many last parts as were written (or all); long beginnings count little."""
    last, wanted = name.rsplit(".", 1)[-1], key.rsplit(".", 1)[-1]
    tail = ".".join(name.split(".")[-(key.count(".") + 1) :])
    alike = 0.5 * _ratio(wanted, last) + 0.5 * max(_ratio(key, name), _ratio(key, tail))
    return max(alike, 0.7 if len(wanted) > 2 and wanted in last else 0)


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()

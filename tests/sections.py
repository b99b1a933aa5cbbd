"""Sections of the configuration with the shipped values, and some of one's choice."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, TypeVar

from hybridrl.config.compose import shipped
from hybridrl.config.values import hints, value_of

S = TypeVar("S")


def section_of(kind: type[S], key: str, config: str = "ppo_trainer", **values: Any) -> S:
    """Make the section of a key with the values of a shipped configuration, but for these."""
    return _made(kind, value_of(shipped(config).values, key) | values)


def _made(kind: type[S], values: Mapping[str, Any]) -> S:
    return kind(**{name: _value(hint, values[name]) for name, hint in hints(kind).items()})


def _value(hint: Any, value: Any) -> Any:
    if is_dataclass(hint) and isinstance(value, Mapping):
        return _made(hint, value)
    is_list = str(hint).startswith(("list[", "typing.Annotated[list["))
    return value if not is_list or isinstance(value, (list, tuple)) else [] if value in (None, "???") else [value]

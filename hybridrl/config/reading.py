"""A typed configuration from nested plain values, with findings about the values."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

from pydantic_core import ValidationError

from hybridrl.config.findings import Finding, Findings, show
from hybridrl.config.values import (
    EXPECTED,
    MISSING,
    Range,
    ValueFault,
    choices,
    hints,
    leaves,
    tree,
    unwrapped,
    validator,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Plain:
    """Nested plain values. `follows`: for a key with a reference, the key that it refers to. `faults`: errors of
    references by key; None for a consequence of another key's error.
    """

    values: dict[str, Any]
    follows: dict[str, str]
    faults: dict[str, Finding | None]


class Reading(Generic[T]):
    """A typed configuration, and the findings about its values.

    The shipped value (`usual`, by key) replaces each `rejected` one, so that the others can be checked. `foreign`:
    values of keys that are not in the schema. `offline`: files and directories may be missing on this machine.
    """

    def __init__(self, schema: type[T], plain: Plain, usual: Callable[[str], Any], *, offline: bool = False) -> None:
        self._usual, self._offline = usual, offline
        self._messages: dict[str, Finding] = {}
        self.rejected: set[str] = {*plain.faults}
        self.foreign: dict[str, Any] = {}
        self.config: T = self._section(schema, plain.values, "")
        reported = self._messages | plain.faults
        # A key that follows another one fails for the same reason.
        ordered = [key for key in dict.fromkeys([*tree(schema), *reported]) if key in reported]
        own = [reported[key] for key in ordered if plain.follows.get(key) not in reported]
        self.findings = Findings([finding for finding in own if finding])

    def _section(self, schema: type, values: Mapping[str, Any], place: str) -> Any:
        fields: dict[str, Any] = {}
        for name, hint in hints(schema).items():
            key, value = f"{place}{name}", values.get(name, MISSING)
            if dataclasses.is_dataclass(hint):
                if not isinstance(value, Mapping):
                    fix = f"set the keys in it, such as {key}.{next(iter(hints(hint)))}=..."
                    self._reject(Finding("value", "error", (key,), show(value), "is a section", fix))
                    value = self._usual(key)
                fields[name] = self._section(hint, value, f"{key}.")
            elif isinstance(value, Mapping) and (inner := _named_sections(hint)) is not None:
                fields[name] = {each: self._named(inner, value[each], f"{key}.{each}") for each in value}
            elif value == MISSING and NoneType in get_args(hint):
                fields[name] = None
            elif value == MISSING:
                self._reject(Finding("value", "error", (key,), cause=f"{key} is not set", fix=f"add {key}=..."))
                fields[name] = validator(hint).validate_python(self._usual(key))
            else:
                fields[name] = self._value(key, hint, value)
        for name in [name for name in values if name not in fields]:
            self.foreign |= leaves({name: values[name]}, place)
        return schema(**fields)

    def _named(self, schema: type, values: Any, key: str) -> Any:
        """A section of a mapping from names that the user chooses; keys without a value are null."""
        keys = hints(schema)
        if not isinstance(values, Mapping):
            fix = f"set the keys in it: {', '.join(f'{key}.{name}' for name in keys)}"
            self._reject(Finding("value", "error", (key,), show(values), "is a section", fix))
            values = {}
        for name in values.keys() - keys.keys():
            cause, fix = f"unknown key {key}.{name}", choices(name, [*keys], [*keys])
            self._reject(Finding("unknown-key", "error", (f"{key}.{name}",), cause=cause, fix=fix.fix or fix.cause))
        return self._section(schema, {name: values[name] for name in values if name in keys}, f"{key}.")

    def _value(self, key: str, hint: Any, value: Any) -> Any:
        reader, (kind, metadata, or_null), typed = validator(hint), unwrapped(hint), None
        try:
            typed = reader.validate_python(value)
            rules = () if typed is None else filter(callable, metadata)
            fault = next((fault for rule in rules if (fault := rule(typed)) is not None), None)
        except OSError as error:  # an overlong name, or a directory without permission
            fault = ValueFault(str(error.strerror), "name another path")
        except ValidationError as invalid:
            ranges = [item for item in metadata if isinstance(item, Range)]
            if get_origin(kind) is Literal:
                fault = choices(value, get_args(kind), [*get_args(kind), *[None] * or_null])
            elif invalid.errors()[0]["type"] == "finite_number":
                fault = ValueFault("must be finite")
            elif ranges and invalid.errors()[0]["type"].startswith(("greater", "less")):
                fault = ValueFault(f"must be {ranges[0].requirement}")
            else:
                fault = ValueFault(f"expected {EXPECTED[get_origin(kind) or kind]}{' or null' * or_null}")
        if fault is None:
            return typed
        cause, fix, absent = fault
        if absent and self._offline:
            self._messages[key] = Finding("not-here", "info", (key,), show(value), cause, fix)
            return typed
        if value == "" and key.startswith("trainer."):  # storage and frequencies do not change training
            cause = f"{key} is empty (is a shell variable not set?): {show(self._usual(key))} is used"
            self._messages[key] = Finding("empty-value", "warning", (key,), cause=cause)
        else:
            suffix = " (a shell variable that was not replaced?)" if str(value).startswith("$") else ""
            cause, fix = (cause, fix + suffix) if fix else (cause + suffix, fix)
            self._reject(Finding("value", "error", (key,), show(value), cause, fix))
        return reader.validate_python(self._usual(key))

    def _reject(self, finding: Finding) -> None:
        self._messages[finding.keys[0]] = finding
        self.rejected.add(finding.keys[0])


def _named_sections(hint: Any) -> type | None:
    """The section that a mapping has under each name; None for a mapping of any values."""
    arguments = get_args(hint) if get_origin(hint) is dict else ()
    return arguments[1] if arguments and dataclasses.is_dataclass(arguments[1]) else None

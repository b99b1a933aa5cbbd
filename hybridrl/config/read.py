"""Plain nested values -> one typed configuration, with a finding for each value that does not fit its type.

pydantic validates, by a core schema that is built here from the types of the sections: building pydantic's own models
would take as long as everything else that `doctor --config-only` does. Values may come as command lines, YAML files and
environment variables have them: numbers and switches as text, one value for a list of one, nothing (`key=`) for null or
an empty list.
"""

import copy
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin

from pydantic_core import (
    CoreSchema,
    ErrorDetails,
    PydanticCustomError,
    SchemaValidator,
    ValidationError,
    core_schema,
)

from hybridrl.config.findings import Finding, Findings, show
from hybridrl.config.keys import hints, is_mapping, tree
from hybridrl.config.values import EXPECTED, Fault, Means, Range, Rule

T = TypeVar("T")
Usual = Callable[[str], Any]  # from a key to its shipped value

SWITCH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
WITHOUT_RULES = "without rules"  # the context of a validation that skips rules
MISSING = "???"  # the value of a key without a default, which must be set


@dataclass(frozen=True)
class Plain:
    """Nested plain values; for each key that takes its value from another one, which; the keys for which that fails.

    A fault that another key causes is None.
    """

    values: dict[str, Any]
    follows: dict[str, str]
    faults: dict[str, Finding | None]


@dataclass
class Reading(Generic[T]):
    """A typed configuration, and what is to be reported about the values it was made of.

    The shipped value replaces each of the `rejected`, so that the others can be checked. `foreign` are the values of
    keys that the schema does not have.
    """

    config: T
    findings: Findings = field(default_factory=Findings)
    rejected: set[str] = field(default_factory=set)
    foreign: dict[str, Any] = field(default_factory=dict)


def read(schema: type[T], plain: Plain, usual: Usual, *, offline: bool = False) -> Reading[T]:
    """Read values by their types. `offline`: files and directories may be missing on this machine."""
    messages: dict[str, Finding] = {}
    values, foreign = _known(schema, plain.values, "", usual, messages)
    rejected, known = {*plain.faults, *messages}, tree(schema)
    try:
        config = _validator(schema).validate_python(values)
    except ValidationError as invalid:
        for error in invalid.errors(include_url=False):
            key = _key(error, known)
            if key in rejected or (key in messages and messages[key].severity == "error"):
                continue
            value = value_of(values, key)
            if error["type"] == "absent" and offline:
                messages[key] = Finding("not-here", "info", (key,), show(value), **_reason(error, known[key]))
                continue
            if value == "" and key.startswith("trainer."):  # where and how often: nothing that changes training
                cause = f"{key} is empty (is a shell variable not set?): {show(usual(key))} is used"
                messages[key] = Finding("empty-value", "warning", (key,), cause=cause)
            else:
                messages[key] = _rejection(key, value, error, known[key])
                rejected.add(key)
            _replace(values, key, usual(key))
        config = _validator(schema).validate_python(values, context=WITHOUT_RULES)
    reported = messages | plain.faults
    # A key that follows another one fails for the same reason.
    ordered = [key for key in dict.fromkeys([*known, *reported]) if key in reported]
    own = [reported[key] for key in ordered if plain.follows.get(key) not in reported]
    return Reading(config, Findings([finding for finding in own if finding]), rejected, foreign)


def _known(
    schema: type, values: Mapping[str, Any], place: str, usual: Usual, messages: dict[str, Finding]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of the schema's keys, complete, and those of other keys by full name."""
    known: dict[str, Any] = {}
    foreign: dict[str, Any] = {}
    for name, hint in hints(schema).items():
        key, value = f"{place}{name}", values.get(name, MISSING)
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, Mapping):
                fix = f"set the keys in it, such as {key}.{next(iter(hints(hint)))}=..."
                messages[key] = Finding("value", "error", (key,), show(value), "is a section", fix)
                value = usual(key)
            known[name], more = _known(hint, value, f"{key}.", usual, messages)
            foreign |= more
        else:
            if value == MISSING:
                cause, fix = f"{key} is not set", f"add {key}=..."
                messages[key] = Finding("value", "error", (key,), cause=cause, fix=fix)
            known[name] = copy.copy(usual(key) if value == MISSING else value)
    for name in [name for name in values if name not in known]:
        foreign |= leaves({name: values[name]}, place)
    return known, foreign


def _key(error: ErrorDetails, known: dict[str, Any]) -> str:
    """The key of an error, whose location may continue into a list or a mapping."""
    names = [str(part) for part in error["loc"]]
    return next(key for count in range(len(names), 0, -1) if (key := ".".join(names[:count])) in known)


def _rejection(key: str, value: Any, error: ErrorDetails, hint: Any) -> Finding:
    reason = _reason(error, hint)
    if str(value).startswith("$"):
        last = "fix" if reason["fix"] else "cause"
        reason[last] += " (a shell variable that was not replaced?)"
    return Finding("value", "error", (key,), show(value), **reason)


def _reason(error: ErrorDetails, hint: Any) -> dict[str, str]:
    """Cause and fix of an error: a rule states its own; for others what the type expects."""
    if error["type"] in ("rule", "absent"):
        return {"cause": error["ctx"]["cause"], "fix": error["ctx"]["fix"]}
    kind, ranges, or_null = _unwrapped(hint)
    if get_origin(kind) is Literal:
        choices = [*get_args(kind), None] if or_null else get_args(kind)
        cause = "choose " + " | ".join(map(show, choices))
    elif ranges and error["type"].startswith(("greater", "less")):
        cause = f"must be {ranges[0].requirement}"
    elif is_mapping(kind):
        cause = error["msg"]
    else:
        cause = f"expected {EXPECTED[kind]}{' or null' * or_null}"
    return {"cause": cause, "fix": ""}


def _unwrapped(hint: Any, or_null: bool = False) -> tuple[Any, list[Range], bool]:
    """The innermost type of a hint (of a list that of its items), its ranges, and whether null is possible."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        kind, ranges, or_null = _unwrapped(arguments[0], or_null)
        return kind, [*ranges, *(item for item in arguments[1:] if isinstance(item, Range))], or_null
    if origin is list:
        return _unwrapped(arguments[0])
    if origin in (Union, UnionType):
        return _unwrapped(next(item for item in arguments if item is not NoneType), or_null=True)
    return hint, [], or_null


def _replace(values: dict[str, Any], key: str, value: Any) -> None:
    section, _, name = key.rpartition(".")
    (value_of(values, section) if section else values)[name] = value


def value_of(values: Mapping[str, Any], key: str) -> Any:
    """The value at a full key in nested values."""
    for name in key.split("."):
        values = values[name]
    return values


def leaves(values: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Nested values by full key; an empty mapping is a value."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = isinstance(value, Mapping) and value
        flat |= leaves(value, f"{place}{name}.") if inner else {f"{place}{name}": value}
    return flat


@functools.cache
def _validator(schema: type) -> SchemaValidator:
    return SchemaValidator(_section(schema))


def _section(schema: type) -> CoreSchema:
    names = hints(schema)
    fields = [core_schema.dataclass_field(name, _typed(hint)) for name, hint in names.items()]
    arguments = core_schema.dataclass_args_schema(schema.__name__, fields)
    return core_schema.dataclass_schema(schema, arguments, list(names))


def _typed(hint: Any) -> CoreSchema:
    """The core schema of a type: what pydantic validates, after the conversions of this module."""
    origin, arguments = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _section(hint)
    if origin is Annotated:
        typed = _typed(arguments[0])
        for item in arguments[1:]:
            typed = _refined(typed, item)
        return typed
    if origin in (Union, UnionType):
        (inner,) = (item for item in arguments if item is not NoneType)
        return _before(lambda value: None if value == "" else value, core_schema.nullable_schema(_typed(inner)))
    if origin is Literal:
        return core_schema.literal_schema(list(arguments))
    if origin is list:
        return _before(_as_list, core_schema.list_schema(_typed(arguments[0])))
    if origin is dict:
        return _before(_as_mapping, core_schema.dict_schema())
    convert, typed = SCALARS[hint]
    return _before(convert, dict(typed))


def _refined(typed: CoreSchema, item: Any) -> CoreSchema:
    """A schema with one piece of metadata of an Annotated type."""
    if isinstance(item, Range):
        bounds = {"ge": item.least, "gt": item.above, "le": item.most, "lt": item.below}
        typed["schema"].update({name: bound for name, bound in bounds.items() if bound is not None})
        return typed
    if isinstance(item, Means):
        return _before(lambda value: item.values.get(show(value).lower(), value), typed)
    return core_schema.with_info_after_validator_function(functools.partial(_obeying, item), typed)


def _obeying(rule: Rule, value: Any, info: core_schema.ValidationInfo) -> Any:
    if info.context == WITHOUT_RULES:
        return value
    try:
        fault = rule.fault(value)
    except OSError as error:  # a name that is too long, a directory that may not be searched
        fault = Fault(str(error.strerror), "name another path")
    if fault is not None:
        raise _error("absent" if fault.absent else "rule", fault.cause, fault.fix)
    return value


def _before(convert: Callable[[Any], Any], typed: CoreSchema) -> Any:
    return core_schema.no_info_before_validator_function(convert, typed)


def _error(kind: Literal["type", "rule", "absent"], cause: str, fix: str = "") -> PydanticCustomError:
    return PydanticCustomError(kind, "{cause}", {"cause": cause, "fix": fix})


def _number(value: Any, kind: type) -> float:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    raise _error("type", f"expected {EXPECTED[kind]}")


def _integer(value: Any) -> int:
    if not (number := _number(value, int)).is_integer():
        raise _error("type", f"expected {EXPECTED[int]}")
    return value if isinstance(value, int) else int(number)


def _float(value: Any) -> float:
    if math.isnan(number := _number(value, float)):
        raise _error("type", f"expected {EXPECTED[float]}")
    return number


def _switch(value: Any) -> bool:
    if str(value).lower() not in SWITCH:
        raise _error("type", f"expected {EXPECTED[bool]}")
    return SWITCH[str(value).lower()]


def _text(value: Any) -> str:
    if value == "" or not isinstance(value, str | int | float):
        raise _error("type", f"expected {EXPECTED[str]}")
    return os.path.expanduser(value) if str(value).startswith("~/") else str(value)


def _as_list(value: Any) -> list[Any]:
    return [] if value is None or value == "" else value if isinstance(value, list) else [value]


def _as_mapping(value: Any) -> dict[Any, Any]:
    if value is not None and value != "" and not isinstance(value, Mapping):
        raise _error("type", "expected names and values: {name: value, ...}")
    return dict(value or {})


SCALARS: dict[type, tuple[Callable[[Any], Any], CoreSchema]] = {
    int: (_integer, core_schema.int_schema()),
    float: (_float, core_schema.float_schema()),
    bool: (_switch, core_schema.bool_schema()),
    str: (_text, core_schema.str_schema()),
}

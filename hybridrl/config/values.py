"""Types of keys for the schema, and the conversion of nested plain values to a typed configuration.

A type is `Annotated` with a `Range`, with `Means`, or with a rule: a function from a value of the right type to its
`ValueFault` or None. Checks of several keys, or of the machine, are in checks/.

pydantic's core validates; building pydantic's own models would take as long as everything else in `doctor
--config-only`. Values may have the forms of command lines, YAML files and environment variables: numbers and switches
as text, one value for a list of one, nothing (`key=`) for null or an empty list.
"""

import dataclasses
import difflib
import functools
import math
import os
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic_core import SchemaValidator, core_schema

from hybridrl.config.findings import show

T = TypeVar("T")

EXPECTED = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
EXPECTED[dict] = "names and values: {name: value, ...}"
SWITCH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
MISSING = "???"  # the value of a key without a default, which must be set


@typing.dataclass_transform()
class Section:
    """A section of the configuration: every class below this one is a dataclass."""

    def __init_subclass__(cls) -> None:
        dataclass(cls)


class ValueFault(NamedTuple):
    """An error of a value, and the fix. `absent`: a missing file or directory that may exist on another machine."""

    cause: str
    fix: str = ""
    absent: bool = False


@dataclass(frozen=True)
class Range:
    """Bounds of a number: `least` and `most` belong to the range, `above` and `below` do not."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    @property
    def requirement(self) -> str:
        words = {"at least": self.least, "more than": self.above, "at most": self.most, "less than": self.below}
        return " and ".join(f"{word} {limit:g}" for word, limit in words.items() if limit is not None)


@dataclass(frozen=True, eq=False)
class Means:
    """Texts that stand for another value, such as trainer.test_freq=false for never."""

    values: dict[str, Any]

    def read(self, value: Any) -> Any:
        return self.values.get(show(value).lower(), value)


@dataclass(frozen=True)
class Commas:
    """Marks a list that may be written as one text with commas."""

    def read(self, value: Any) -> Any:
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, str | int | float) for item in items):
            return value
        return [part for item in items for part in re.split(r"\s*,\s*", str(item).strip()) if part]


@dataclass(frozen=True)
class Infinite:
    """Marks a limit that may be infinite (no limit); other numbers must be finite."""


def pair(value: list[Any]) -> ValueFault | None:
    """A rule: a list of two values."""
    return None if len(value) == 2 else ValueFault("expected 2 values: [a, b]")


def validation_metric(value: str) -> ValueFault | None:
    """A rule: a validation metric, with a leading - if the least value is best."""
    if re.fullmatch(r"-?(val/loss|val-core/.+/(acc|reward)/.+@.+|val-aux/.+/.+)", value):
        return None
    return ValueFault("is not a validation metric", "name one, such as val-core/gsm8k/acc/mean@1, or -val/loss")


def actions(value: dict[str, Any]) -> ValueFault | None:
    """A rule: actions by the code of a diagnosis."""
    wrong = [f"{code}: {action}" for code, action in value.items() if action not in ACTIONS]
    return ValueFault(f"{wrong[0]}: choose {' | '.join(ACTIONS)}") if wrong else None


def functions(value: list[str]) -> ValueFault | None:
    """A rule: custom functions, each as path/to/file.py:function."""
    return next(filter(None, map(name_or_function(()), value)), None)


def loggers(value: list[str]) -> ValueFault | None:
    """A rule: the files of custom sinks; other names are checked together (checks/algorithm.py)."""
    return functions([name for name in value if ":" in name])


def rule_code(name: str) -> str:
    """The code of a custom health rule: path/to/file.py:slow_grader is slow-grader."""
    return name.rpartition(":")[2].replace("_", "-")


def choices(value: Any, names: Sequence[Any], shown: Sequence[Any]) -> ValueFault:
    """The fault of a value that is not in `shown`; its fix is the most similar of the names."""
    similar = difflib.get_close_matches(str(value), map(str, names), n=1, cutoff=0.7)
    return ValueFault("choose " + " | ".join(map(show, shown)), f"did you mean {similar[0]}?" if similar else "")


def name_or_function(names: tuple[str, ...]) -> Callable[[str], ValueFault | None]:
    """A rule: one of the built-in names, or a custom function as path/to/file.py:function."""

    def rule(value: str) -> ValueFault | None:
        file, colon, _ = value.rpartition(":")
        if value in names or Path(file).is_file():
            return None
        if colon:
            return ValueFault(f"there is no file {file}", absent=True)
        return choices(value, names, [*names, "path/to/file.py:function"])

    return rule


Positive = Annotated[int, Range(least=1)]
Natural = Annotated[int, Range(least=0)]
Port = Annotated[int, Range(least=1, most=65535)]
NonNegative = Annotated[float, Range(least=0)]
AboveZero = Annotated[float, Range(above=0)]
Limit = Annotated[float, Range(above=0), Infinite()]
Seconds = AboveZero
Share = Annotated[float, Range(least=0, most=1)]
ShareAboveZero = Annotated[float, Range(above=0, most=1)]
Decay = Annotated[float, Range(least=0, below=1)]
TopK = Annotated[int, Range(least=-1)]
Frequency = Annotated[int, Means({"false": -1})]

DIAGNOSES = (
    "policy-jump", "kl-jump", "kl-drift", "truncation", "no-signal", "teacher-far", "teacher-unreached", "no-context",
    "teacher-diverges", "score-fall", "not-finite", "unknown-tokens", "clipping", "entropy-collapse", "length-collapse",
    "entropy-rise", "length-rise", "gradient-rise", "value-loss-rise", "repetition", "overfitting", "memory-full",
    "flat-score",
)  # fmt: skip
SCHEDULES = ("constant", "linear", "cosine", "wsd", "inverse_sqrt")
# Includes the names of transformers, of verl's other engines and of Megatron.
ScheduleName = Annotated[
    str,
    name_or_function(SCHEDULES),
    Means({
        "wsd": "wsd", "warmup_stable_decay": "wsd", "inverse-square-root": "inverse_sqrt",
        "inverse_square_root": "inverse_sqrt", "constant_with_warmup": "constant", "cosine_with_min_lr": "cosine",
    }),
]  # fmt: skip
ACTIONS = ("off", "warn", "stop", "rollback", "rebuild")
REWARD_MANAGERS = ("naive", "dapo", "gdpo", "prime", "remote", "batch", "group", "rate_limited")
LOGGERS = ("console", "verl_console", "file", "tensorboard", "wandb", "mlflow", "swanlab", "trackio", "clearml")
PACKAGES = LOGGERS[3:]  # loggers whose package has their name

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
CheckpointPart = Literal["model", "optimizer", "extra", "hf_model"]
Recomputation = Annotated[Literal[True, False, 2, 3, 4], Means({**SWITCH, "2": 2, "3": 3, "4": 4})]
# The texts in Means are SkyRL's.
ResumeMode = Annotated[
    Literal["auto", "disable", "resume_path"],
    Means({"latest": "auto", "none": "disable", "null": "disable", "from_path": "resume_path"}),
]
DType = Literal["bf16", "fp16", "fp32", "bfloat16", "float16", "float32"]
# A trailing + takes the gradient of k2; full sums over the whole vocabulary.
KLForm = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3",
    "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+", "full",
]  # fmt: skip


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


def holds(keys: dict[str, Any], key: str) -> bool:
    """Whether a key is in the schema, or in a mapping of it, which takes any names. `keys`: the result of `tree`."""
    parts = key.split(".")
    above = (keys.get(".".join(parts[:count])) for count in range(1, len(parts)))
    return key in keys or any(typing.get_origin(unwrapped(hint)[0]) is dict for hint in above)


def value_of(values: Mapping[str, Any], key: str) -> Any:
    """The value at a full key in nested values."""
    return functools.reduce(lambda inner, name: inner[name], key.split("."), values)


def leaves(values: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Nested values by full key; an empty mapping is a value."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = isinstance(value, Mapping) and value
        flat |= leaves(value, f"{place}{name}.") if inner else {f"{place}{name}": value}
    return flat


def unwrapped(hint: Any, or_null: bool = False) -> tuple[Any, list[Any], bool]:
    """The innermost type of a hint (for a list, the type of its items), its metadata, and whether null is possible."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        kind, metadata, or_null = unwrapped(arguments[0], or_null)
        return kind, [*metadata, *arguments[1:]], or_null
    if origin is list:
        return unwrapped(arguments[0])
    if origin in (Union, UnionType):
        return unwrapped(next(item for item in arguments if item is not NoneType), or_null=True)
    return hint, [], or_null


@functools.cache
def validator(hint: Any) -> SchemaValidator:
    return SchemaValidator(_typed(hint))


def _typed(hint: Any) -> Any:
    """The core schema of a type. Values are converted before validation; unreadable ones stay unchanged."""
    origin, arguments, before = get_origin(hint), get_args(hint), core_schema.no_info_before_validator_function
    if origin is Annotated:
        typed = _typed(arguments[0])
        for item in arguments[1:]:
            if isinstance(item, Range):
                bounds = {"ge": item.least, "gt": item.above, "le": item.most, "lt": item.below}
                typed["schema"].update({name: bound for name, bound in bounds.items() if bound is not None})
            elif isinstance(item, Infinite):
                typed["schema"]["allow_inf_nan"] = True
            elif isinstance(item, Means | Commas):
                typed = before(item.read, typed)
        return typed
    if origin in (Union, UnionType):
        (inner,) = (item for item in arguments if item is not NoneType)
        return before(lambda value: None if value == "" else value, core_schema.nullable_schema(_typed(inner)))
    if origin is Literal:
        return core_schema.literal_schema(list(arguments))
    if origin is list:
        items = core_schema.list_schema(_typed(arguments[0]))
        return before(
            lambda value: [] if value in (None, "") else [value] if not isinstance(value, list) else value, items
        )
    if origin is dict:
        return before(lambda value: {} if value in (None, "") else value, core_schema.dict_schema())
    convert, kind = {
        int: (_integer, core_schema.int_schema(strict=True)),
        float: (_float, core_schema.float_schema(strict=True, allow_inf_nan=False)),
        bool: (lambda value: SWITCH.get(str(value).lower()), core_schema.bool_schema(strict=True)),
        str: (_text, core_schema.str_schema(strict=True, min_length=1)),
    }[hint]
    return before(convert, kind)


def _float(value: Any) -> Any:
    try:
        number = value if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return value
    return None if math.isnan(number) else number


def _integer(value: Any) -> Any:
    if isinstance(value, int):
        return value
    number = _float(value)
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _text(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("~/"):
        return os.path.expanduser(value)
    return str(value) if isinstance(value, int | float) else value

"""Key names: those of the schema, the nearest valid ones to a mistyped one, and what becomes of keys of verl, SkyRL and
AReaL that hybridrl does not have (verl/*.yaml, read once)."""

import dataclasses
import difflib
import functools
import re
import typing
from dataclasses import dataclass, field
from fnmatch import translate
from pathlib import Path
from typing import Any, Literal

import yaml

SYSTEMS = {"verl": "verl_keys.yaml", "SkyRL": "skyrl_keys.yaml", "AReaL": "areal_keys.yaml"}
Kind = Literal["rejected", "combined", "translated", "ignored"]
KINDS: tuple[Kind, ...] = typing.get_args(Kind)  # in the order in which they are consulted
TRANSLATED = ("combined", "translated")  # whose keys set others
OTHERWISE = "otherwise"  # rejected if no other entry names the key


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
    known = value_keys(schema)
    if (meant := trl_names().get(key)) in known:
        return f"TRL's {key} is {meant} here"
    names = nearest(current_name(key), known)
    return f"nearest: {', '.join(names)}" if names else "--help all lists all keys"


@functools.cache
def trl_names() -> dict[str, str]:
    """The key of hybridrl with the meaning of each name of TRL."""
    file = Path(__file__).parent / "verl" / "trl_names.yaml"
    return yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader)


CLASS = "._target_"  # how verl's files name the class of a section


@dataclass(frozen=True, eq=False)
class Entry:
    """One entry of a table, for all keys that its patterns name.

    `values` maps patterns of a value to what replaces it; `when` limits the entry to values that match it; a `named`
    entry rejects its keys wherever a command line names them, whatever their value; a `last` entry counts only if no
    other names the key; an entry is silent unless the keys of `only` have these values. `usual` and `drops` belong to
    combined entries: values of keys that are not set, and values that count as not set.
    """

    kind: Kind
    keys: tuple[str, ...]
    why: str = ""
    silent: tuple[Any, ...] = ()
    follows: str | None = None
    sets: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    when: str = ""
    only: dict[str, Any] = field(default_factory=dict)
    usual: dict[str, Any] = field(default_factory=dict)
    drops: dict[str, Any] = field(default_factory=dict)
    named: bool = False
    last: bool = False
    pattern: re.Pattern[str] = re.compile("")

    def is_silent(self, value: Any) -> bool:
        """Whether the value changes nothing, so that nothing is reported."""
        alike = (item == value and isinstance(item, bool) == isinstance(value, bool) for item in self.silent)
        return value is None or value == "" or self.silent == ("*",) or any(alike)

    def concerns(self, value: Any) -> bool:
        return re.search(self.when, str(value)) is not None

    def value_of(self, text: str) -> Any:
        """What replaces a value, if `values` states it."""
        matches = ((re.fullmatch(pattern, text), value) for pattern, value in self.values.items())
        match, value = next(((match, value) for match, value in matches if match), (None, None))
        return match.expand(value) if match and isinstance(value, str) else value


@dataclass(frozen=True)
class VerlKeys:
    """`moved`: old names and the current ones. `defaults`: by system (or verl's program), keys of hybridrl that have
    another default there."""

    moved: dict[str, str]
    defaults: dict[str, dict[str, Any]]
    entries: tuple[Entry, ...]


@functools.cache
def verl_keys() -> VerlKeys:
    """The three tables in one; if several names begin a key, the longest counts."""
    folder = Path(__file__).parent / "verl"
    tables = {
        name: yaml.load((folder / file).read_text(encoding="utf-8"), yaml.CSafeLoader) for name, file in SYSTEMS.items()
    }
    entries = [_entry(kind, **values) for kind in KINDS for table in tables.values() for values in table.get(kind, [])]
    last = [values for table in tables.values() for values in table.get(OTHERWISE, [])]
    entries += [_entry("rejected", last=True, **values) for values in last]
    moved = {old: new for table in tables.values() for old, new in table["moved"].items()}
    # AReaL's sections actor, ref and rollout are verl's old names for others: what an entry names stays as it is.
    kept = {key: key for entry in entries for key in entry.keys if any(key.startswith(f"{old}.") for old in moved)}
    names = dict(sorted((kept | moved).items(), key=lambda item: -len(item[0])))
    defaults = {name: table["defaults"] for name, table in tables.items()} | tables["verl"]["sft_defaults"]
    return VerlKeys(names, defaults, tuple(entries))


def _entry(kind: Kind, keys: list[str], **values: Any) -> Entry:
    names = "|".join(translate(form) for key in keys for form in (key, f"{key}.*"))
    values["silent"] = tuple(values.get("silent", ()))
    return Entry(kind, tuple(keys), pattern=re.compile(names), **values)


def entry_of(key: str, value: Any = None) -> Entry | None:
    """The entry for a key, by its current name; if there are several, the first that concerns the value."""
    entries = _entries_of(key)
    return next((entry for entry in entries if entry.concerns(value)), entries[0] if entries else None)


@functools.cache
def _entries_of(key: str) -> list[Entry]:
    matching = [entry for entry in verl_keys().entries if entry.pattern.match(key)]
    if key.endswith(CLASS):  # of any section, also of one whose other keys are rejected
        return [entry for entry in matching if f"*{CLASS}" in entry.keys]
    return [entry for entry in matching if not entry.last] or matching


@functools.cache
def current_name(key: str) -> str:
    """The current name of a key with an old name, or a name of another system; any other key unchanged."""
    for old, new in verl_keys().moved.items():
        if key == old or key.startswith(old + "."):
            return key if new == old else current_name(new + key[len(old) :])
    return key

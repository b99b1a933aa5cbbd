"""Keys of verl, SkyRL and AReaL that are no keys here, and what becomes of them: three YAML files, read once."""

import functools
import re
from dataclasses import dataclass, field
from fnmatch import translate
from pathlib import Path
from typing import Any, Literal

import yaml

SYSTEMS = {"verl": "verl_keys.yaml", "SkyRL": "skyrl_keys.yaml", "AReaL": "areal_keys.yaml"}
KINDS = ("refused", "translated", "ignored")  # in the order in which they are consulted
OTHERWISE = "otherwise"  # rejected where no other entry names the key


@dataclass(frozen=True, eq=False)
class Entry:
    """One entry of a file, for all keys that its patterns name.

    `values` maps patterns of a value to what replaces it; `when` limits the entry to values that match it; a `named`
    entry rejects its keys wherever a command line names them, whatever their value; a `last` entry counts where no
    other names the key.
    """

    kind: Literal["refused", "translated", "ignored"]
    keys: tuple[str, ...]
    why: str = ""
    silent: tuple[Any, ...] = ()
    follows: str | None = None
    sets: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    when: str = ""
    named: bool = False
    last: bool = False
    pattern: re.Pattern[str] = re.compile("")

    def is_silent(self, value: Any) -> bool:
        """Whether the value changes nothing, so that nothing is said of it."""
        alike = (item == value and isinstance(item, bool) == isinstance(value, bool) for item in self.silent)
        return value is None or value == "" or any(alike)

    def concerns(self, value: Any) -> bool:
        return re.search(self.when, str(value)) is not None

    def value_of(self, text: str) -> Any:
        """What stands for a value here, where `values` says it."""
        matches = ((re.fullmatch(pattern, text), value) for pattern, value in self.values.items())
        found = next(((match, value) for match, value in matches if match), None)
        if found is None:
            return None
        match, value = found
        return match.expand(value) if isinstance(value, str) else value


@dataclass(frozen=True)
class VerlKeys:
    """`defaults`: by system (or verl's program), keys here that have another value there where nothing is set."""

    moved: dict[str, str]
    defaults: dict[str, dict[str, Any]]
    entries: tuple[Entry, ...]


@functools.cache
def verl_keys() -> VerlKeys:
    """What all three files say; of several names that begin a key, the longest counts."""
    tables = {name: _table(file) for name, file in SYSTEMS.items()}
    entries = [_entry(kind, **values) for kind in KINDS for table in tables.values() for values in table[kind]]
    last = [values for table in tables.values() for values in table.get(OTHERWISE, [])]
    entries += [_entry("refused", last=True, **values) for values in last]
    moved = {old: new for table in tables.values() for old, new in table["moved"].items()}
    # AReaL's sections actor, ref and rollout are verl's old names for others: what an entry names stays as it is.
    kept = {key: key for entry in entries for key in entry.keys if any(key.startswith(f"{old}.") for old in moved)}
    names = dict(sorted((kept | moved).items(), key=lambda item: -len(item[0])))
    defaults = {name: table["defaults"] for name, table in tables.items()} | tables["verl"]["sft_defaults"]
    return VerlKeys(names, defaults, tuple(entries))


def _table(file: str) -> dict[str, Any]:
    return yaml.load((Path(__file__).parent / file).read_text(encoding="utf-8"), yaml.CSafeLoader)


def _entry(kind: Literal["refused", "translated", "ignored"], keys: list[str], **values: Any) -> Entry:
    named = "|".join(translate(form) for key in keys for form in (key, f"{key}.*"))
    values["silent"] = tuple(values.get("silent", ()))
    return Entry(kind, tuple(keys), pattern=re.compile(named), **values)


def entry_of(key: str, value: Any = None) -> Entry | None:
    """The entry that judges a key, by its present name; where several do, the first that concerns the value."""
    entries = _entries_of(key)
    return next((entry for entry in entries if entry.concerns(value)), entries[0] if entries else None)


@functools.cache
def _entries_of(key: str) -> list[Entry]:
    found = [entry for entry in verl_keys().entries if entry.pattern.match(key)]
    return [entry for entry in found if not entry.last] or found


@functools.cache
def current_name(key: str) -> str:
    """The present name of a key that carries an old one, or another system's; any other key unchanged."""
    for old, new in verl_keys().moved.items():
        if key == old or key.startswith(old + "."):
            return key if new == old else current_name(new + key[len(old) :])
    return key

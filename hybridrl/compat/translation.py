"""Translation of arguments and keys that are those of another system.

A system has a table of names and values, such as verl.yaml, and entries that compute, in entries.py. `translate`
replaces a command's arguments, or a file's; what is left, `check` reports once all values are known. A run knows verl's
keys. Those of SkyRL and AReaL, which share names with verl, are translated by `hybridrl migrate`.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

from hybridrl.compat.entries import (
    KINDS,
    OF_AREAL,
    OF_SKYRL,
    OF_VERL,
    REJECTING,
    SETTING,
    Entry,
    Look,
    argument_of_reward,
)
from hybridrl.config.compose import Argument, as_override, key_of, read_argument, usual_value
from hybridrl.config.findings import Finding, Findings, show
from hybridrl.config.values import holds, leaves, tree, value_keys

SHOWN = 4  # keys that are named if more share a reason
CLASS = "._target_"  # how verl's files name the class of a section
CHOICE = ".choice"  # after the name of a section: what a command chooses for all of it
EFFECTS = {"ignored": "has no effect"} | dict.fromkeys(SETTING, "is translated")


@dataclass
class ForeignCommand:
    """The arguments of a command while they are translated, and what becomes of them.

    `values` and `texts` are by the current names of their keys; `around` is what its custom file sets. `arguments` are
    pairs: a resulting argument, and the written one, or "" if `check` handles its key. `others` are the keys of other
    systems; `places` are the arguments that set a key, each with its value. `engine` is SkyRL's, which has the
    arguments of any engine in one section.
    """

    schema: type
    around: Mapping[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    arguments: list[tuple[str, str]] = field(default_factory=list)
    others: dict[str, list[str]] = field(default_factory=dict)
    findings: Findings = field(default_factory=Findings)
    places: dict[str, dict[str, Any]] = field(default_factory=dict)
    engine: Any = "vllm"

    def put(self, key: str, value: str, text: str) -> None:
        self.arguments.append((f"++{key}={value}", text if holds(tree(self.schema), key) else ""))

    def place(self, key: str, value: Any, text: str) -> None:
        """Note the argument that sets a key. It is an error if another name sets another value; the same name may."""
        if value is None or "${" in str(value):
            return
        places = {there: item for there, item in self.places.get(key, {}).items() if key_of(there) != key_of(text)}
        if other := next((there for there, item in places.items() if _alike(item) != _alike(value)), None):
            cause = f"{other} and {text} are two places of {key}, with different values"
            self.findings.error("conflict", cause, "leave one out", keys=(key_of(other), key_of(text)))
        self.places[key] = places | {text: value}

    def find(self, key: str, usual: Any) -> Any:
        values = (place[key] for place in (self.values, self.around) if place.get(key) is not None)
        is_value = key in value_keys(self.schema)
        return next(values, usual if usual is not None or not is_value else usual_value(self.schema, key))

    def stays(self, key: str, dropped: Any) -> bool:
        """Whether the user set this key under its hybridrl name, to a value that does not count as none."""
        if key_of(self.texts.get(key, "")) == key:
            return self.values[key] not in (None, dropped)
        there = self.around.get(key)  # a file has all keys of the shipped one that it lists
        return there not in (None, dropped) and there != usual_value(self.schema, key)

    def texts_of(self, keys: list[str]) -> tuple[str, list[str]]:
        """The arguments of some keys, and these, first the name that the first is written with."""
        text = " ".join(self.texts[key] for key in keys)
        return text, [key_of(text), *keys]


class Translation:
    """The keys of a system. `base` is one whose names it shares; the keys of `others` are rejected in a sentence."""

    def __init__(self, system: str, computed: list[Entry], base: "Translation | None" = None) -> None:
        self.system, self.base, self._computed = system, base, computed
        self.others: list[Translation] = []
        self._entries_of = cache(self._matching)

    @cached_property
    def table(self) -> dict[str, Any]:
        return read_table(f"{self.system.lower()}.yaml")

    @cached_property
    def trl_names(self) -> dict[str, str]:
        return read_table("trl_names.yaml")

    @cached_property
    def entries(self) -> list[Entry]:
        return [Entry(kind, **values) for kind in KINDS for values in self.table.get(kind, [])] + self._computed

    @cached_property
    def consulted(self) -> list[Entry]:
        both = [*(self.base.entries if self.base else ()), *self.entries]
        return sorted(both, key=lambda entry: KINDS.index(entry.kind))

    @cached_property
    def moved(self) -> dict[str, str]:
        """Old names and the current ones. AReaL's sections actor, ref and rollout are verl's old names for others: what
        an entry names stays as it is."""
        unchanged = {key: key for entry in self.consulted for key in entry.keys}
        return unchanged | (self.base.table["moved"] if self.base else {}) | self.table["moved"]

    def current_name(self, key: str) -> str:
        """The current name of a key with an old name, or a name of another system; any other key unchanged."""
        parts = key.split(".")
        for count in range(len(parts), 0, -1):
            if new := self.moved.get(old := ".".join(parts[:count])):
                return key if new == old else self.current_name(".".join([new, *parts[count:]]))
        return key

    def entry_of(self, key: str, value: Any = None) -> Entry | None:
        """The entry for a key, by its current name; if there are several, the first that concerns the value."""
        entries = self._entries_of(key)
        return next((entry for entry in entries if entry.concerns(value)), entries[0] if entries else None)

    def _matching(self, key: str) -> list[Entry]:
        matching = [entry for entry in self.consulted if entry.names(key)]
        if key.endswith(CLASS):  # in any section, even if its other keys are rejected
            return [entry for entry in matching if f"*{CLASS}" in entry.keys]
        return [entry for entry in matching if entry.kind != "otherwise"] or matching

    def meets(self, key: str, schema: type, value: Any = None) -> tuple[str, Entry | None, bool]:
        """The current name of a key; the entry for it, if it is none of the schema's; whether the schema holds it."""
        new, schema_tree = key, tree(schema)
        for name_of in (self.current_name, argument_of_reward):
            new = new if new in schema_tree else name_of(new)
        entry = self.entry_of(new, value)
        if new in schema_tree and not (entry and entry.when and new in entry.keys and entry.concerns(value)):
            entry = None
        return new, entry, holds(schema_tree, new)

    def of_other(self, key: str, schema: type) -> "Translation | None":
        """The other system that has a key."""
        return next((system for system in self.others if any(system.meets(key, schema)[1:])), None)

    def described(self, key: str, schema: type) -> tuple[str, str]:
        """Current name of a key, and what happens to it if hybridrl does not have it."""
        new, entry, in_schema = self.meets(key, schema)
        if not entry and not in_schema and (other := self.of_other(key, schema)):
            new, entry, _ = other.meets(key, schema)
        silent = f" (except for {', '.join(map(show, entry.silent))})" if entry and entry.silent else ""
        return new, f"{EFFECTS.get(entry.kind, 'is rejected')}{silent}: {entry.reason}" if entry else ""

    def listed(self) -> list[tuple[str, str]]:
        """The keys of all systems that hybridrl does not have, each with its treatment."""
        systems = (self, *self.others)
        moved = [(old, f"is now {new}") for system in systems for old, new in system.table["moved"].items()]
        entries = [(key, entry) for system in systems for entry in system.entries for key in entry.keys]
        return moved + [(key, f"{entry.kind}: {entry.reason}") for key, entry in entries]

    def translate(
        self, arguments: Iterable[Argument], schema: type, around: Mapping[str, Any], *, of_file: bool = False
    ) -> ForeignCommand:
        """Translate the arguments of a command, or `of_file`. `around`: what its custom file sets, by key."""
        command = ForeignCommand(schema, {self.current_name(key): value for key, value in around.items()})
        arguments = [*arguments]
        command.engine = {self.current_name(item.key): item.value for item in arguments}.get(
            "generator.backend", "vllm"
        )
        switches, values = self.table.get("switches", ()), {argument.key: argument.value for argument in arguments}
        off = tuple(key.removesuffix("rank") for key in switches if values.get(key) == 0)
        for argument in map(_engine_of_section, (item for item in arguments if not item.key.startswith(off))):
            for single in self._keys_of_section(argument, schema):
                self._translate(single, command)
        self._combine(command)
        for key in [*command.places] if of_file else ():  # a file may list what is usual
            if around.get(key) != usual_value(schema, key):
                command.place(key, around.get(key), f"{key}={show(around.get(key))}")
        for system, keys in command.others.items():
            cause = f"{_listed(keys)} {'are keys' if keys[1:] else 'is a key'} of {system}, not of a run here"
            fix = "hybridrl migrate run.sh prints the command for hybridrl"
            command.findings.error("unsupported", cause, fix, keys=keys)
        return command

    def _keys_of_section(self, argument: Argument, schema: type) -> list[Argument]:
        """The arguments of a section's keys, if the argument sets a whole section that hybridrl does not have."""
        key, value = self.current_name(argument.key), argument.value
        if not isinstance(value, Mapping) or holds(tree(schema), key) or not self.entry_of(key):
            return [argument]
        return [
            read_argument(f"++{name}={as_override(item)}") for name, item in leaves(value, f"{argument.key}.").items()
        ]

    def _translate(self, argument: Argument, command: ForeignCommand) -> None:
        text, raw, findings = argument.text, argument.raw, command.findings
        key, entry, in_schema = self.meets(argument.key, command.schema, argument.value)
        if key != argument.key and command.engine == "sglang":
            key = key.replace(".engine_kwargs.vllm", ".engine_kwargs.sglang")
        command.values[key], command.texts[key] = argument.value, text.lstrip("+")
        choice = None if argument.package else self.table.get("choices", {}).get(key)
        if key != argument.key and in_schema and not argument.package:  # Hydra's way to say where a group's values go
            follows = "${" in raw and key in raw  # what it would set
            if follows or (raw in ("", "null") and not argument.deletes):  # an old name without a value
                return
            findings.warn("old-name", f"{argument.key} is now {key}", keys=(argument.key, key))
        if argument.deletes:
            command.arguments += [(f"~{key}", text)] * in_schema
        elif entry:
            _apply_entry(entry, key, argument, command, in_schema)
        elif choice and raw != "default":
            if raw != choice:
                command.put(f"{key}{CHOICE}", raw, text)
        elif in_schema and key != argument.key and not argument.package:
            command.put(key, raw, text)
            command.place(key, argument.value, text.lstrip("+"))
        elif not in_schema and (other := self.of_other(argument.key, command.schema)):
            command.others.setdefault(other.system, []).append(argument.key)
        else:
            command.arguments.append((text, text))
            if in_schema and not argument.package and self.base is None:  # the others share names with other meanings
                command.place(key, argument.value, text.lstrip("+"))

    def _combine(self, command: ForeignCommand) -> None:
        """Translate the keys that count together, in the table's order. A later entry wins, and what the command or its
        file sets by hybridrl's name stays."""
        named, computed = defaultdict[Entry, list[str]](list), dict[Entry, dict[str, Any]]()
        for key, value in command.values.items():
            entry = self.meets(key, command.schema, value)[1]
            if entry and entry.kind == "combined" and entry.concerns(value) and not entry.is_silent(value):
                named[entry].append(key)
        for entry in (entry for entry in self.consulted if entry in named):
            sets = self._compute(entry, named[entry], command)
            for earlier in computed.values():  # two entries set the same value: the first reports it
                sets = {key: value for key, value in sets.items() if earlier.get(key, ...) != value}
                for key in sets:
                    earlier.pop(key, None)
            computed[entry] = sets
        for entry, sets in computed.items():
            text, keys = command.texts_of(named[entry])
            why = f": {entry.why}" if entry.why and not any(map(callable, entry.sets.values())) else ""  # or a meaning
            if sets:
                cause = " ".join(f"{key}={show(value)}" for key, value in sets.items())
                command.findings.warn("old-name", f"{text} is now {cause}{why}", keys=(*keys, *sets))
            elif why:
                command.findings.warn("ignored-key", f"{text} has no effect{why}", keys=keys)
            for key, value in sets.items():
                command.put(key, as_override(value), text)

    def _compute(self, entry: Entry, keys: list[str], command: ForeignCommand) -> dict[str, Any]:
        """Return the keys that an entry sets. Further ones that this translates, but those with such an entry of their
        own, are added to its `keys`, and no longer left."""
        look, sets, failed = Look(command.find, entry, [command.values[key] for key in keys]), {}, {}
        for key, value in entry.sets.items():
            stays = command.stays(key, entry.drops.get(key)) or (entry.usual and command.values.get(key))
            if stays and not (entry.is_same and callable(value)):
                continue
            try:
                computed = value(look) if callable(value) else value
            except (ValueError, ArithmeticError) as error:
                failed |= {} if stays else {key: error}
                continue
            for name in keys if entry.is_same and callable(value) else ():
                command.place(key, command.values[name] if computed == look.value else computed, command.texts[name])
            sets |= {key: computed} if computed is not None and not stays else {}
        for key in (key for key in look.read if key in command.values and key not in keys):
            _, read, in_schema = self.meets(key, command.schema, command.values[key])
            keys += [key] * (not in_schema and (read is None or read.kind != "combined"))
        dropped = {*keys, *(key for key, value in entry.drops.items() if command.values.get(key) == value)}
        command.arguments = [pair for pair in command.arguments if key_of(pair[0]) not in dropped]
        text, names = command.texts_of(keys)
        for key, error in failed.items():
            cause = f"{text}: {key} is not computed from {error}"
            command.findings.error("unsupported", cause, f"set {key}", keys=names)
        return sets

    def check(
        self, foreign: Mapping[str, Any], values: Mapping[str, Any], schema: type
    ) -> tuple[list[Finding], list[str]]:
        """Return the findings about keys that hybridrl does not have, given the values of all keys, and those of them
        that are unknown. What was translated, or rejected with the arguments, is left out."""
        shared, findings, unknown = defaultdict[str, list[str]](list), Findings(), []
        reasons = dict[str, Entry]()
        for key, value in foreign.items():
            _, entry, in_schema = self.meets(key, schema, value)
            if in_schema or (entry and entry.kind in SETTING):
                continue
            if entry is None:
                unknown += [key] * (self.of_other(key, schema) is None)
            elif not entry.is_silent(value) and not entry.accepts(value, values):
                shared[reasons.setdefault(entry.why, entry).why].append(key)  # one reason holds for several keys
        for why, keys in sorted(shared.items(), key=lambda item: reasons[item[0]].kind not in REJECTING):
            entry, set_values = reasons[why], [foreign[key] for key in keys]
            if entry.kind in REJECTING:
                keys = [key.removesuffix(CHOICE) for key in keys]  # as they are written
                settings = [f"{key}={show(item)}" for key, item in zip(keys, set_values, strict=True)]
                cause = f"{_listed(settings)}: {entry.why}"
                fix = entry.fix(set_values[0], values) if entry.fix else ""
                findings.error("unsupported", cause, fix, keys=keys, value=show(set_values[0]))
            else:
                cause = f"{_listed(keys)} {'have' if keys[1:] else 'has'} no effect: {entry.why}"
                findings.warn("ignored-key", cause, keys=keys)
        return findings.items, unknown


def _engine_of_section(argument: Argument) -> Argument:
    """`actor@actor_rollout_ref.actor=NAME_actor`, by which verl chooses a section's engine, as a key of the section."""
    chosen = re.fullmatch(r"(\w+)_(actor|ref|critic)", argument.raw) if argument.package else None
    if chosen is None:
        return argument
    return replace(argument, key=f"{argument.package}.model_engine", raw=chosen[1], value=chosen[1], package=None)


def _alike(value: Any) -> Any:
    """A number, or the text in lower case: two texts with the same meaning are equal."""
    text = show(value).lower()
    try:
        return float(text)
    except ValueError:
        return text


def _listed(texts: list[str]) -> str:
    return ", ".join(texts[:SHOWN]) + (f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else "")


def _apply_entry(entry: Entry, key: str, argument: Argument, command: ForeignCommand, in_schema: bool) -> None:
    """Translate a key that hybridrl does not have, or leave it to be checked by its value."""
    value, text, concerned, sets = argument.value, argument.text, entry.concerns(argument.value), entry.kind in SETTING
    if in_schema and concerned and not sets:  # one name of a mapping that takes any other, or a value of a key
        if entry.kind in REJECTING:
            command.findings.error("unsupported", f"{text}: {entry.why}", keys=key)
        elif not entry.is_silent(value):
            command.findings.warn("ignored-key", f"{key} has no effect: {entry.why}", keys=key)
    elif (sets and not concerned) or (entry.named and value != command.around.get(key)):
        # null is how the other system switches a key off; a file may name a key that a command may not.
        if value not in (None, ""):
            command.findings.error("unsupported", f"{text}: {entry.why}", keys=key)
    elif not sets:
        command.put(key, argument.raw, text)
    elif entry.kind == "translated":
        replacement = entry.value_of(argument.raw)
        if replacement is not None or not entry.is_silent(value):
            shown = show(argument.raw if replacement is None else replacement)
            values = {name: show(item).replace("{value}", shown) for name, item in entry.sets.items()}
            cause = f"{text} is now {' '.join(f'{name}={item}' for name, item in values.items())}"
            command.findings.warn("old-name", cause, keys=(key, *values))
            for name, item in values.items():
                command.put(name, item, text)
                command.place(name, item, text.lstrip("+"))


def read_table(file: str) -> dict[str, Any]:
    return yaml.load((Path(__file__).parent / file).read_text(encoding="utf-8"), yaml.CSafeLoader)


VERL = Translation("verl", OF_VERL)
VERL.others = [Translation("SkyRL", OF_SKYRL, VERL), Translation("AReaL", OF_AREAL, VERL)]
SYSTEMS = {translation.system: translation for translation in (VERL, *VERL.others)}

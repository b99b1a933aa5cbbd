"""A JSON Schema of configuration files, for completion and checks in editors: `hybridrl train --schema`.

Values are valid in the forms that values.py reads, such as one value for a list of one, and so are references to other
keys. Keys of verl that the loader translates or names are valid, and marked as deprecated.
"""

import dataclasses
import re
import types
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml

from hybridrl import plugins
from hybridrl.config.catalog import ESTIMATORS, POLICY_LOSSES
from hybridrl.config.compose import CONF, SHIPPED, shipped
from hybridrl.config.load import key_meanings
from hybridrl.config.schema_parts import PRESETS
from hybridrl.config.values import EXPECTED, MISSING, SCHEDULES, SWITCH, Commas, Means, Range, hints, tree, value_of

# Names that a key takes as well as a function in a file.
NAMES = {
    "algorithm.adv_estimator": ESTIMATORS,
    "actor_rollout_ref.actor.policy_loss.loss_mode": POLICY_LOSSES,
    "eval.preset": PRESETS,
    "actor_rollout_ref.rollout.name": plugins.names("engine"),
    **dict.fromkeys(
        (f"{part}optim.lr_scheduler_type" for part in ("actor_rollout_ref.actor.", "critic.", "")), SCHEDULES
    ),
}
REFERENCE = r"\$\{"
NUMBER = rf"{REFERENCE}|^[-+]?(\.?inf|[\d.]+(e[-+]?\d+)?)$"  # as text; 1e-6 is text in YAML 1.1
TEXTS = {int: NUMBER, float: NUMBER, bool: rf"{REFERENCE}|^({'|'.join(SWITCH)})$", dict: REFERENCE}
TYPES = {int: ["integer"], float: ["number"], bool: ["boolean", "integer"], dict: ["object", "null"]}
PLAIN = {
    kind: {"type": [*types, "string"], "pattern": TEXTS[kind], "patternErrorMessage": f"expected {EXPECTED[kind]}"}
    for kind, types in TYPES.items()
} | {str: {"type": ["string", "number", "boolean"], "minLength": 1}}
LIMITS = {"least": "minimum", "above": "exclusiveMinimum", "most": "maximum", "below": "exclusiveMaximum"}
VERL = {"deprecated": True, "description": "a key of verl: hybridrl explain KEY describes its effect"}


def json_schema(schema: type) -> dict[str, Any]:
    """Return the JSON Schema of files for PPOConfig or SFTConfig."""
    top = _Sections(schema).schema_of(schema, "")
    top["properties"] |= {"defaults": {"type": "array", "description": "the files that come first"}, "hydra": {}}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"{SHIPPED[schema]}.yaml", **top}


class _Sections:
    def __init__(self, schema: type) -> None:
        self._schema, self._keys, self._verl = schema, tree(schema), plugins.load("translation")
        self._usual = shipped(SHIPPED[schema]).values
        self._meanings = key_meanings(CONF / f"{SHIPPED[schema]}.yaml")
        self._forms = [form for entry in self._verl.entries for form in entry.keys]

    def schema_of(self, section: type, place: str) -> dict[str, Any]:
        """Return the schema of a section; `place` is its name with a dot at the end."""
        keys = {name: self._of_key(f"{place}{name}", hint) for name, hint in hints(section).items()}
        names = {form.rpartition(".")[2] for form in self._forms if fnmatchcase(place, f"{form.rpartition('.')[0]}.")}
        pattern = "|".join(sorted(re.escape(name).replace(r"\*", ".*") for name in names))
        _, entry, in_schema = self._verl.meets(f"{place}any_name", self._schema)
        further: dict[str, Any] = {"patternProperties": {f"^({pattern})$": {}}} if names else {}
        further["additionalProperties"] = bool(entry or in_schema)
        return {"type": "object", "properties": {**dict(self._old_names(place)), **keys}, **further}

    def _of_key(self, key: str, hint: Any) -> dict[str, Any]:
        if dataclasses.is_dataclass(hint):
            return self.schema_of(hint, f"{key}.")
        choices, default = _choices(hint), value_of(self._usual, key)
        if key in NAMES:
            choices.insert(0, {"enum": [*NAMES[key]]})
        if key in self._forms:  # another value is verl's
            choices.append({"type": "string", **VERL})
        described = {"description": self._meanings[key]} | ({"default": default} if default != MISSING else {})
        return described | (choices[0] if len(choices) == 1 else {"anyOf": choices})

    def _old_names(self, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield verl's old names of keys in a section, and the sections that only verl has."""
        for old in [*self._forms, *self._verl.table["moved"]]:
            name, dot, _ = old.removeprefix(place).partition(".")
            new, entry, in_schema = self._verl.meets(old, self._schema)
            if old.startswith(place) and "*" not in name and (entry or in_schema):
                current = {"$ref": "/properties/".join(["#", *new.split(".")])}
                same = {"anyOf": [current, {"type": "null"}]} if new in self._keys else {}
                yield name, VERL if dot or new == old else {**VERL, "description": f"is now {new}", **same}


def _choices(hint: Any) -> list[dict[str, Any]]:
    """Return the schemas of which a value meets one."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        choices = _choices(arguments[0])
        for item in arguments[1:]:
            if isinstance(item, Range):
                bounds = {name: getattr(item, field) for field, name in LIMITS.items()}
                choices[0] = choices[0] | {name: bound for name, bound in bounds.items() if bound is not None}
            elif isinstance(item, Means):
                choices.append({"enum": [*item.values, *map(yaml.safe_load, item.values)]})
            elif isinstance(item, Commas):
                choices.append({"type": "string"})
        return choices
    if origin in (Union, types.UnionType):
        return [choice for part in arguments for choice in _choices(part)]
    if origin is Literal:
        return [{"enum": [*arguments]}, {"type": "string", "pattern": REFERENCE}]
    if origin is list:
        items = _choices(arguments[0])
        item = items[0] if len(items) == 1 else {"anyOf": items}
        return [{"type": "array", "items": item}, {"type": "null"}, *items]
    return [{"type": "null"}] if hint is types.NoneType else [PLAIN[origin or hint]]

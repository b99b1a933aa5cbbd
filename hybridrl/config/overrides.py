"""The arguments of a command line -> overrides for Hydra: old names are replaced, unknown keys reported.

Values are validated later (read.py); here only those that decide which key is meant.
"""

import re
from dataclasses import dataclass, field
from typing import Any, cast, get_args

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from hybridrl.config.findings import ConfigError, Findings, show
from hybridrl.config.keys import Entry, current_name, entry_of, holds, nearest_keys, tree

OWN = "own"  # the section of the user's own keys
# verl's manager batch passes its own arguments to the reward function.
_MANAGER_KWARGS, _FUNCTION_KWARGS = "reward.reward_kwargs.", "reward.custom_reward_function.reward_kwargs."
# Sections that verl chooses by name -> the choice that hybridrl implements.
VERL_CHOICES = {"engine": "fsdp", "optim": "fsdp", "model": "hf_model"}
PLAIN = re.compile(r"[A-Za-z_/~][\w./~-]*")  # text that needs no quotes, and is not read as a number


@dataclass
class Overrides:
    """Hydra's overrides, and for each key that they set the argument it came from."""

    known: dict[str, Any]
    findings: Findings
    arguments: list[str] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)

    def set(self, key: str, value: str, text: str) -> None:
        # "++" sets what exists and adds what does not; a whole section is chosen by the name of its file.
        self.arguments.append(f"{'++' if '.' in key else ''}{key}={value}")
        self.written[key] = text

    def unsupported(self, text: str, key: str, cause: str, fix: str = "") -> None:
        self.findings.error("unsupported", f"{text}: {cause}", fix, keys=key)

    def add(self, text: str, override: Override) -> bool:
        """Add one argument. Returns False if there is no such key; raises ConfigError if it cannot be set like this."""
        written, value = cast(str, override.key_or_group), text.partition("=")[2]
        key = written if written in self.known else current_name(written)
        if key.startswith(_MANAGER_KWARGS) and key not in self.known and "overlong_buffer_cfg" not in key:
            key = key.replace(_MANAGER_KWARGS, _FUNCTION_KWARGS)
        entry, known = None if key in self.known else entry_of(key, override.value()), holds(self.known, key)
        if key.startswith("hydra."):
            self.findings.warn("ignored-key", f"{key} has no effect: Hydra only reads the configuration here", keys=key)
            return True
        if key != written and known:
            if value in ("", "null") and not override.is_delete():
                return True  # an old name without a value
            self.findings.warn("old-name", f"{written} is now {key}", keys=(written, key))
        if override.package:
            self.arguments.append(text)
        elif override.is_delete():
            self._delete(text, key)
        elif entry and known and entry.concerns(override.value()):  # one name of a mapping that takes any other
            if not entry.is_silent(override.value()):
                self.findings.warn("ignored-key", f"{key} has no effect: {entry.why}", keys=key)
        elif entry and not known:
            self._add_entry(entry, key, value, override, text)
        elif key in VERL_CHOICES and value != "default":
            if value != VERL_CHOICES[key]:
                self.unsupported(text, key, "training runs on FSDP2", "leave it out")
        elif known:
            if "." not in key and not isinstance(override.value(), str):
                raise ConfigError(f"{text}: {key} is a section", fix=f"set the keys in it one by one: {key}.key=value")
            self.set(key, value, text)
        elif (override.is_add() or override.is_force_add()) and "." in key:
            cause = f"{key} is not a key of hybridrl: kept as {OWN}.{key} for your own code"
            self.findings.info("own-key", cause, keys=key)
            self.set(f"{OWN}.{key}", value, text)
        else:
            return False
        return True

    def _add_entry(self, entry: Entry, key: str, value: str, override: Override, text: str) -> None:
        """Translate a key of another system that hybridrl does not have, or pass it on to be checked by its value."""
        if entry.named and override.value() not in (None, ""):
            return self.unsupported(text, key, entry.why)
        if entry.kind != "translated":
            self.arguments.append(f"++{key}={value}")
            return None
        if not entry.concerns(override.value()):
            return self.unsupported(text, key, entry.why)
        replacement = entry.value_of(value)
        if replacement is not None or not entry.is_silent(override.value()):
            value = show(value if replacement is None else replacement)
            sets = {name: show(item).replace("{value}", value) for name, item in entry.sets.items()}
            cause = f"{text} is now {' '.join(f'{name}={item}' for name, item in sets.items())}"
            self.findings.warn("old-name", cause, keys=(key, *sets))
            for name, item in sets.items():
                self.set(name, item, text)
        return None

    def _delete(self, text: str, key: str) -> None:
        """`~key`: a key that may be null becomes null; a key that hybridrl does not have is ignored."""
        if key in self.known:
            if type(None) not in get_args(self.known[key]):
                raise ConfigError(f"{text}: this key must have a value", fix="set it to another one")
            self.set(key, "null", text)
        elif holds(self.known, key):
            self.arguments.append(f"~{key}")


def parse_overrides(overrides: list[str], schema: type, findings: Findings) -> Overrides:
    """Sort the arguments of a command line; unknown keys are errors."""
    parsed = Overrides(tree(schema), findings)
    for text in overrides:
        with findings.gathered("syntax"):
            override = _parse(text)
            if not parsed.add(text, override):
                key = cast(str, override.key_or_group)
                findings.error("unknown-key", f"unknown key {key}", nearest_keys(key, schema), keys=key)
    return parsed


def as_override(value: Any) -> str:
    """A value for the command line, with quotes if they are needed."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{as_override(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(as_override, value))}]"
    if not isinstance(value, str):
        return show(value)
    if PLAIN.fullmatch(value):
        return value
    escaped = re.sub(r"(\\*)(?='|$)", r"\1\1", value).replace("'", "\\'")
    return f"'{escaped}'"


def _parse(text: str) -> Override:
    key, equals, value = text.partition("=")
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        if not equals or not key.strip("+~").replace(".", "").isidentifier():
            raise ConfigError(f"cannot read {text}: expected key=value") from error
        quoted = value.replace("\\", "\\\\").replace('"', '\\"')
        raise ConfigError(f"""cannot read {text}: expected a value, or one in quotes: '{key}="{quoted}"'""") from error
    if not override.key_or_group:
        raise ConfigError(f"cannot read {text}: expected key=value")
    if override.is_sweep_override():
        raise ConfigError(f"{text}: one value is expected", fix=f"for a list write {key}=[{value}]", keys=key)
    return override

"""The words of a command line -> overrides as Hydra takes them: old names moved, what is no key told apart.

Values are judged later (read.py); here only those that decide which key is meant.
"""

import re
from dataclasses import dataclass, field
from typing import Any, cast, get_args

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from hybridrl.config.error import ConfigError
from hybridrl.config.findings import Findings
from hybridrl.config.names import holds, tree, unknown_key, value_keys
from hybridrl.config.read import show
from hybridrl.config.verl_keys import Entry, current_name, entry_of

OWN = "own"  # the section of the user's own keys
# verl's manager batch hands its own arguments to the reward function.
_MANAGER_KWARGS, _FUNCTION_KWARGS = "reward.reward_kwargs.", "reward.custom_reward_function.reward_kwargs."
# Sections that verl chooses by name -> the choice that stands for what is here.
VERL_CHOICES = {"engine": "fsdp", "optim": "fsdp", "model": "hf_model"}
PLAIN = re.compile(r"[A-Za-z_/~][\w./~-]*")  # text that needs no quotes, and is not read as a number


@dataclass
class Taken:
    """What a command line becomes: Hydra's overrides, and for each key that it sets how that was written."""

    arguments: list[str] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)

    def set(self, key: str, value: str, text: str) -> None:
        # "++" sets what is there and adds what is not; a whole section is chosen by the name of its file.
        self.arguments.append(f"{'++' if '.' in key else ''}{key}={value}")
        self.written[key] = text


def take(overrides: list[str], schema: type, found: Findings) -> Taken:
    """Sort the words of a command line; what is no key is refused."""
    known, taken = tree(schema), Taken()
    for text in overrides:
        try:
            override = _parse(text)
            _take(text, override, known, taken, found)
        except ConfigError as error:
            found.refuse("syntax", str(error))
        except LookupError:
            found.refuse("unknown-key", unknown_key(cast(str, override.key_or_group), value_keys(schema)))
    return taken


def _take(text: str, override: Override, known: dict[str, Any], taken: Taken, found: Findings) -> None:
    """Raises LookupError for what is no key, ConfigError for what cannot be set in this way."""
    written, value = cast(str, override.key_or_group), text.partition("=")[2]
    key = written if written in known else current_name(written)
    if key.startswith(_MANAGER_KWARGS) and key not in known and "overlong_buffer_cfg" not in key:
        key = key.replace(_MANAGER_KWARGS, _FUNCTION_KWARGS)
    entry = None if key in known else entry_of(key, override.value())
    if key.startswith("hydra."):
        return found.warn("ignored-key", f"{key} has no effect: Hydra only reads the configuration here")
    if key != written and holds(known, key):
        if value in ("", "null") and not override.is_delete():
            return None  # an old name that says nothing
        found.warn("old-name", f"{written} is now {key}")
    if override.package:
        taken.arguments.append(text)
    elif override.is_delete():
        _delete(text, key, known, taken)
    elif (
        entry and holds(known, key) and entry.concerns(override.value())
    ):  # among names that any may join, but this one
        if not entry.is_silent(override.value()):
            found.warn("ignored-key", f"{key} has no effect: {entry.why}")
    elif entry and not holds(known, key):
        _take_entry(entry, key, value, override, taken, found, text)
    elif key in VERL_CHOICES and value != "default":
        if value != VERL_CHOICES[key]:
            found.refuse("unsupported", f"{text}: training runs on FSDP2; leave it out")
    elif holds(known, key):
        if "." not in key and not isinstance(override.value(), str):
            raise ConfigError(f"{text}: {key} is a section; set the keys in it one by one: {key}.key=value")
        taken.set(key, value, text)
    elif (override.is_add() or override.is_force_add()) and "." in key:
        found.inform("own-key", f"{key} is no key here: kept as {OWN}.{key}, for code of your own")
        taken.set(f"{OWN}.{key}", value, text)
    else:
        raise LookupError(key)
    return None


def _take_entry(
    entry: Entry, key: str, value: str, override: Override, taken: Taken, found: Findings, text: str
) -> None:
    """A key of verl's that is none here: what it stands for is set, or it goes along to be judged by its value."""
    if entry.named and override.value() not in (None, ""):
        return found.refuse("unsupported", f"{text}: {entry.why}")
    if entry.kind != "translated":
        taken.arguments.append(f"++{key}={value}")
        return None
    if not entry.concerns(override.value()):
        return found.refuse("unsupported", f"{text}: {entry.why}")
    here = entry.value_of(value)
    if here is not None or not entry.is_silent(override.value()):
        value = show(value if here is None else here)
        sets = {name: show(item).replace("{value}", value) for name, item in entry.sets.items()}
        found.warn("old-name", f"{text} is now {' '.join(f'{name}={item}' for name, item in sets.items())}")
        for name, item in sets.items():
            taken.set(name, item, text)
    return None


def _delete(text: str, key: str, known: dict[str, Any], taken: Taken) -> None:
    """`~key`: a key that may be null becomes so; what is not here anyway is gone already."""
    if key in known:
        if type(None) not in get_args(known[key]):
            raise ConfigError(f"{text}: this key must have a value; set it to another one")
        taken.set(key, "null", text)
    elif holds(known, key):
        taken.arguments.append(f"~{key}")


def as_override(value: Any) -> str:
    """A value as the command line takes it, with quotes where they are needed."""
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
        raise ConfigError(f"{text}: one value is expected; for a list write {key}=[{value}]")
    return override

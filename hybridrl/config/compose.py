"""Hydra's files and the arguments of a command line -> plain nested values. Only this module uses Hydra.

Old names of keys are replaced and unknown ones reported here; values are validated later (values.py), but for those
that decide which key is meant.
"""

import functools
import re
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from hybridrl.config.combined import Written
from hybridrl.config.findings import ConfigError, Finding, Findings, show
from hybridrl.config.keys import TRANSLATED, Entry, current_name, entry_of, hints, holds, nearest_keys, tree
from hybridrl.config.schema import PPOConfig, SFTConfig
from hybridrl.config.values import MISSING, Plain, leaves, value_of

PACKAGE = Path(__file__).resolve().parent.parent
PRESET = "preset"  # the group of files that set keys of several sections
# In a wheel conf/ is inside the package, in a checkout next to it.
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"
REFERENCE = re.compile(r"\$\{([\w.]+)\}")
SHIPPED = {PPOConfig: "ppo_trainer", SFTConfig: "sft_trainer"}

OWN = "own"  # the section of the user's own keys
# verl's manager batch passes its own arguments to the reward function.
_MANAGER_KWARGS, _FUNCTION_KWARGS = "reward.reward_kwargs.", "reward.custom_reward_function.reward_kwargs."
# Sections that verl chooses by name -> the choice that hybridrl implements.
VERL_CHOICES = {"engine": "fsdp", "optim": "fsdp", "model": "hf_model"}
PLAIN = re.compile(r"[A-Za-z_/~][\w./~-]*")  # text that needs no quotes, and is not read as a number


def save_config(config: PPOConfig | SFTConfig | str, path: Path) -> None:
    """Write the resolved configuration, or its YAML, as a file that `--config-path` can load, and no other user can
    read: it may hold secrets."""
    written = path.with_name(f".{path.name}.writing")
    written.unlink(missing_ok=True)
    written.touch(mode=0o600)
    written.write_text(config if isinstance(config, str) else as_yaml(config), encoding="utf-8")
    written.replace(path)


def as_yaml(config: PPOConfig | SFTConfig, section: str = "") -> str:
    """The configuration, or a section or key of it, as YAML. Raises ConfigError if there is none of this name."""
    values = as_dict(config)
    for name in filter(None, section.split(".")):
        if name not in (values if isinstance(values, dict) else ()):
            raise ConfigError(f"--package={section}: there is no such section", fix=nearest_keys(section, type(config)))
        values = values[name]
    return OmegaConf.to_yaml(values) if isinstance(values, dict) else f"{show(values)}\n"


def as_dict(config: PPOConfig | SFTConfig) -> dict[str, Any]:
    return asdict(config)


def as_section(values: dict[str, Any]) -> DictConfig:
    """Plain values as a custom class expects a section: by attribute, by name, and by `get` with a default."""
    return OmegaConf.create(values)


@functools.cache
def shipped(config_name: str) -> Plain:
    """The values of a shipped configuration without any override; "???" where one must be set."""
    return resolved(composed(CONF / f"{config_name}.yaml", []))


def usual_value(schema: type, key: str) -> Any:
    return value_of(shipped(SHIPPED[schema]).values, key)


def composed(file: Path, arguments: list[str]) -> DictConfig:
    """Compose a file, those it lists, and overrides. Raises ConfigError."""
    state = state_of(file.parent) | state_of(CONF)
    values = [text for text in arguments if text.startswith("++") and not text.startswith("++hydra.")]
    choices = tuple(text for text in arguments if text not in values)
    with suppress(HydraException, OmegaConfBaseException):  # Hydra itself reports what is wrong
        overrides = OverridesParser.create().parse_overrides(values)
        special = [override for override in overrides if override.is_sweep_override()]
        if not special and not any(text.startswith("~") for text in choices):  # its place among the values counts
            config = deepcopy(composed_by_hydra(file, choices, state))
            for override in overrides:
                OmegaConf.update(config, override.key_or_group, override.value(), merge=True, force_add=True)
            return config
    return deepcopy(composed_by_hydra(file, tuple(arguments), state))


@functools.lru_cache(maxsize=16)
def composed_by_hydra(file: Path, arguments: tuple[str, ...], state: frozenset) -> DictConfig:
    """Compose them by Hydra, which takes long; remembered for files in this `state`, for the next run of a sweep."""
    if file.parent != CONF:
        arguments = (*arguments, f"hydra.searchpath=['file://{CONF}']")
    try:
        with initialize_config_dir(config_dir=str(file.parent), version_base="1.3"):
            return compose(config_name=file.stem, overrides=[*arguments])
    except MissingConfigException as error:
        missing = "=".join((error.missing_cfg_file or "").rsplit("/", 1))
        fix = f"choose {' | '.join(error.options)}" if error.options else ""
        raise ConfigError(f"{missing}: there is no such configuration file", fix=fix) from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file}, or a file it lists, is not YAML: {' '.join(str(error).split())}") from error
    except (HydraException, OmegaConfBaseException, OSError, ValueError) as error:
        raise ConfigError(f"{file}: {str(error).strip().splitlines()[0]}") from error


def presets() -> dict[str, str]:
    """The names of the shipped presets, each with the first line of its comment."""
    comments = {file.stem: file.read_text(encoding="utf-8").splitlines()[1] for file in CONF.glob(f"{PRESET}/*.yaml")}
    return {name: comment.removeprefix("# ") for name, comment in sorted(comments.items())}


def file_values(file: Path, overrides: list[str]) -> Plain:
    """Another system's YAML file and those in its directory that it lists; `overrides` win. Raises ConfigError."""
    try:
        loaded = OmegaConf.load(file)
        if not isinstance(loaded, DictConfig):
            raise ConfigError(f"{file}: names and values are expected")
        listed = [file.parent / f"{name}.yaml" for name in loaded.pop("defaults", []) if isinstance(name, str)]
        loaded.pop("hydra", None)
        first = [OmegaConf.create(file_values(other, []).values) for other in listed if other.is_file()]
        return resolved(cast(DictConfig, OmegaConf.merge(*first, loaded, OmegaConf.from_dotlist(overrides))))
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException, OSError, ValueError) as error:
        raise ConfigError(f"{file}: {' '.join(str(error).split())}") from error


def resolved(node: DictConfig, place: str = "", around: Plain | None = None) -> Plain:
    """Values with every ${reference} resolved; those that cannot be resolved are among the faults."""
    plain = Plain({}, around.follows, around.faults) if around else Plain({}, {}, {})
    for name, written in cast(dict, OmegaConf.to_container(node)).items():
        key = f"{place}{name}"
        if (reference := REFERENCE.fullmatch(str(written))) is not None:
            target = reference[1].lstrip(".")
            dots = len(reference[1]) - len(target)  # .name is a key of the same section, ..name of the one around it
            plain.follows[key] = f"{place.rsplit('.', dots)[0]}.{target}" if dots else target
        try:
            value = MISSING if written == MISSING else node[name]
            if isinstance(value, DictConfig):
                value = resolved(value, f"{key}.", plain).values
            elif isinstance(value, ListConfig):
                value = OmegaConf.to_container(value, resolve=True)
            plain.values[name] = value
        except InterpolationToMissingValueError:
            plain.values[name] = MISSING
        except OmegaConfBaseException as error:
            plain.values[name], cause = MISSING, str(error).splitlines()[0]
            # Other keys may refer to this one in turn, and fail for the same reason.
            known = any(finding is not None and finding.cause == cause for finding in plain.faults.values())
            plain.faults[key] = None if known else Finding("value", "error", (key,), show(written), cause)
    return plain


@dataclass
class Overrides:
    """Hydra's overrides, and for each key that they set the argument it came from.

    `values` and `texts`: the values and arguments by the current names of their keys; `own`: keys with this name.
    """

    known: dict[str, Any]
    findings: Findings
    arguments: list[str] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)

    def set(self, key: str, value: str, text: str) -> None:
        # "++" sets what exists and adds what does not; a whole section is chosen by the name of its file.
        self.arguments.append(f"{'++' if '.' in key else ''}{key}={value}")
        self.written[key] = text

    def unsupported(self, text: str, key: str, cause: str, fix: str = "") -> None:
        self.findings.error("unsupported", f"{text}: {cause}", fix, keys=key)

    def add(self, text: str, override: Override) -> bool:
        """Add one argument. Returns False if there is no such key; raises ConfigError if it cannot be set like this."""
        written, value = cast(str, override.key_or_group), text.partition("=")[2]
        if written == PRESET or (written == "algorithm" and value in presets()):
            self.arguments.append(f"+{PRESET}={value}")
            self.written[PRESET] = text
            return True
        key = written if written in self.known else current_name(written)
        if key.startswith(_MANAGER_KWARGS) and key not in self.known and "overlong_buffer_cfg" not in key:
            key = key.replace(_MANAGER_KWARGS, _FUNCTION_KWARGS)
        entry, known = None if key in self.known else entry_of(key, override.value()), holds(self.known, key)
        self.values[key], self.texts[key] = override.value(), text.lstrip("+")
        self.own = self.own | {key} if key == written else self.own - {key}
        if key.startswith("hydra."):
            self.findings.warn("ignored-key", f"{key} has no effect: Hydra only reads the configuration here", keys=key)
            return True
        if key != written and known:
            if value in ("", "null") and not override.is_delete():
                return True  # an old name without a value
            if not override.package:  # Hydra's way to say where a group's values go
                self.findings.warn("old-name", f"{written} is now {key}", keys=(written, key))
        if override.package:
            self.arguments.append(text)
        elif override.is_delete():  # a key that may be null becomes null; one that hybridrl does not have is ignored
            if key in self.known and type(None) not in get_args(self.known[key]):
                raise ConfigError(f"{text}: this key must have a value", fix="set it to another one")
            if key in self.known:
                self.set(key, "null", text)
            elif known:
                self.arguments.append(f"~{key}")
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
            cause = f"{key} is kept as {OWN}.{key} for your own code"
            self.findings.info("own-key", cause, keys=key)
            self.set(f"{OWN}.{key}", value, text)
        else:
            return False
        return True

    def _add_entry(self, entry: Entry, key: str, value: str, override: Override, text: str) -> None:
        """Translate a key of another system that hybridrl does not have, or pass it on to be checked by its value."""
        if entry.named and override.value() not in (None, ""):
            return self.unsupported(text, key, entry.why)
        if entry.kind not in TRANSLATED:
            self.arguments.append(f"++{key}={value}")
            return None
        if not entry.concerns(override.value()):  # null is how the other system switches it off
            return None if override.value() in (None, "") else self.unsupported(text, key, entry.why)
        if entry.kind == "combined":
            return None  # translated once all arguments are known
        replacement = entry.value_of(value)
        if replacement is not None or not entry.is_silent(override.value()):
            value = show(value if replacement is None else replacement)
            sets = {name: show(item).replace("{value}", value) for name, item in entry.sets.items()}
            cause = f"{text} is now {' '.join(f'{name}={item}' for name, item in sets.items())}"
            self.findings.warn("old-name", cause, keys=(key, *sets))
            for name, item in sets.items():
                self.set(name, item, text)
        return None

    def combine(self, around: Mapping[str, Any], schema: type) -> None:
        """Translate the keys that count together. `around`: what a custom file sets."""
        written = Written(self.values, self.own, around, self.known, lambda key: usual_value(schema, key))
        for made in written.combinations():
            keys = [*made.keys, *made.reads]
            text = " ".join(self.texts[key] for key in keys)
            # The first by the name that it is written with, with which the message begins.
            keys = [text.partition("=")[0], *keys]
            for target, numbers in made.failed.items():
                fix = f"set {target} to {made.entry.sets[target]}"
                self.findings.error("unsupported", f"{text}: {numbers} is not computed", fix, keys=keys)
            if made.sets:
                cause = " ".join(f"{name}={show(value)}" for name, value in made.sets.items())
                self.findings.warn("old-name", f"{text} is now {cause}", keys=(*keys, *made.sets))
            replaced = {f"++{key}" for key in made.reads}
            replaced |= {f"++{key}" for key, value in made.entry.drops.items() if self.values.get(key) == value}
            self.arguments = [argument for argument in self.arguments if argument.partition("=")[0] not in replaced]
            for name, value in made.sets.items():
                self.set(name, as_override(value), text)


def parse_overrides(
    overrides: list[str], schema: type, findings: Findings, around: Mapping[str, Any] | None = None
) -> Overrides:
    """Sort the arguments of a command line; unknown keys are errors. `around`: what a custom file sets, by key."""
    parsed = Overrides(tree(schema), findings)
    for text in overrides:
        key, equals, value = text.partition("=")
        with findings.gathered("syntax"):
            try:
                override = OverridesParser.create().parse_override(text)
            except HydraException as error:
                cause = f"cannot read {text}: expected "
                if not equals or not key.strip("+~").replace(".", "").isidentifier():
                    raise ConfigError(cause + "key=value") from error
                quoted = value.replace("\\", "\\\\").replace('"', '\\"')
                raise ConfigError(f"""{cause}a value, or one in quotes: '{key}="{quoted}"'""") from error
            if not override.key_or_group:
                raise ConfigError(f"cannot read {text}: expected key=value")
            if override.is_sweep_override():
                fix = f"for a list write {key}=[{value}]; " if "(" not in value else ""
                fix += "hybridrl sweep runs each value"
                raise ConfigError(f"{text}: one value is expected", fix=fix, keys=key)
            if not parsed.add(text, override):
                name = cast(str, override.key_or_group)
                if name.startswith("hydra/"):
                    cause, fix = (
                        f"{name}: Hydra only reads the configuration here",
                        "hybridrl sweep runs several values",
                    )
                    findings.error("unsupported", cause, fix, keys=name)
                    continue
                section = name.replace("/", ".")
                fix = (
                    f"set its keys one by one, as {section}.key=value"
                    if section != name
                    else nearest_keys(name, schema)
                )
                findings.error("unknown-key", f"unknown key {name}", fix, keys=name)
    parsed.combine({current_name(key): value for key, value in (around or {}).items()}, schema)
    return parsed


def split_sweep(overrides: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Separate arguments with one value from those with several, as Hydra writes them: `key=a,b`, `key=choice(a,b)`,
    `key=range(0,4)`. Their values are returned by key, as texts. Raises ConfigError."""
    fixed: list[str] = []
    swept: dict[str, list[str]] = {}
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException:
            fixed.append(text)  # reported when it is read
            continue
        if not override.is_sweep_override():
            fixed.append(text)
        elif not override.is_discrete_sweep():
            raise ConfigError(f"{text}: single values are expected", fix="write them out: key=a,b, or key=range(0,4)")
        else:
            swept[text.partition("=")[0]] = list(override.sweep_string_iterator())
    return fixed, swept


def plain_values(file: Path, schema: type, arguments: list[str], findings: Findings) -> Plain:
    """The values of a configuration file with overrides. Raises ConfigError.

    Old names in a custom file, and keys without effect, are overrides too: as on a command line, which comes after them
    and wins.
    """
    known, replaced, dropped = tree(schema), [], []
    old = custom_values(file)
    for key, value in old.items():
        new = current_name(key)
        entry = None if new in known else entry_of(new, value)
        moved = (entry and entry.kind in TRANSLATED) or (new != key and holds(known, new))
        if moved and "${" in str(value) and new in str(value):
            continue  # it follows what it would set
        idle = entry and new == key and holds(known, key) and entry.concerns(value)
        if value != MISSING and (moved or idle):
            replaced.append(f"++{key}={as_override(value)}")
            dropped += [key] * bool(idle)
    first = parse_overrides(replaced, schema, findings, old).arguments
    plain = resolved(composed(file, [*first, *arguments]))
    for key in dropped:  # of a mapping that takes any name; Hydra cannot delete what is null
        section, _, name = key.rpartition(".")
        value_of(plain.values, section).pop(name, None)
    if missing := [name for name in hints(schema) if name not in plain.values]:
        fix = f"begin it with defaults: [{SHIPPED[schema]}, _self_]"
        raise ConfigError(f"{file} has no {', '.join(missing)}", fix=fix)
    return plain


def custom_values(file: Path) -> dict[str, Any]:
    """The values of a custom file and those it lists, by key; none of a shipped file. Raises ConfigError."""
    return {} if file.parent == CONF else written_in(file, state_of(file.parent))


@functools.lru_cache(maxsize=1)
def written_in(file: Path, state: frozenset) -> dict[str, Any]:
    """The values of a custom file and those it lists, by key; remembered for files in this `state`, for the next run of
    a sweep."""
    return leaves(cast(dict, OmegaConf.to_container(composed(file, []))))


def state_of(directory: Path) -> frozenset[tuple[Path, int]]:
    """The configuration files in a directory and its groups, with the times of their last changes."""
    files = [*directory.glob("*.yaml"), *directory.glob("*/*.yaml")]
    return frozenset((file, file.stat().st_mtime_ns) for file in files if file.is_file())


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

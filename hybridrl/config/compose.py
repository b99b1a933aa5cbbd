"""From Hydra's files and the arguments of a command line to plain nested values. Only this module uses Hydra.

Unknown keys are reported here; values are validated later (values.py).
"""

import dataclasses
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
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from hybridrl import plugins, project_file
from hybridrl.config.findings import ConfigError, Finding, Findings, nearest, show
from hybridrl.config.reading import Plain
from hybridrl.config.schema import EvaluationConfig, PPOConfig, SFTConfig, TrainingConfig
from hybridrl.config.values import MISSING, hints, holds, leaves, tree, value_keys, value_of

PRESET = "preset"  # the group of files that set keys of several sections
# In a wheel conf/ is inside the package, in a checkout next to it.
CONF = Path(project_file("conf")).absolute()
REFERENCE = re.compile(r"\$\{([\w.]+)\}")
SHIPPED = {PPOConfig: "ppo_trainer", SFTConfig: "sft_trainer"}

OWN = "own"  # the section of the user's own keys
# Text that needs no quotes, and is not read as another value.
PLAIN = re.compile(r"(?!(?i:null|true|false|inf|nan|~)$)[A-Za-z_/~][\w./~-]*")


def save_config(text: str, path: Path) -> None:
    """Write a resolved configuration, as YAML, to a file for `--config-path`. Other users cannot read the file: it may
    hold secrets."""
    written = path.with_name(f".{path.name}.writing")
    written.unlink(missing_ok=True)
    written.touch(mode=0o600)
    written.write_text(text, encoding="utf-8")
    written.replace(path)


def as_yaml(config: TrainingConfig | EvaluationConfig, section: str = "") -> str:
    """The configuration, or a section or key of it, as YAML. Raises ConfigError for an unknown name."""
    values: Any = asdict(config)
    for name in filter(None, section.split(".")):
        if name not in (values if isinstance(values, dict) else ()):
            raise ConfigError(f"--package={section}: there is no such section", fix=nearest_keys(section, type(config)))
        values = values[name]
    return OmegaConf.to_yaml(values) if isinstance(values, dict) else f"{show(values)}\n"


def nearest_keys(key: str, schema: type) -> str:
    """The fix for an unknown key: the most similar valid keys."""
    valid, translation = value_keys(schema), plugins.load("translation")
    if (meant := translation.trl_names.get(key)) in valid:
        return f"TRL's {key} is {meant} here"
    names = nearest(translation.current_name(key), valid)
    command = "sft" if SHIPPED.get(schema) == "sft_trainer" else "train"
    return f"nearest: {', '.join(names)}" if names else f"hybridrl {command} --help all lists all keys"


def as_section(values: dict[str, Any]) -> DictConfig:
    """Plain values as a section for custom classes: access by attribute, by name, and by `get` with a default."""
    return OmegaConf.create(values)


@functools.cache
def shipped(config_name: str) -> Plain:
    """The values of a shipped configuration without overrides; "???" for values that must be set."""
    return resolved(composed(CONF / f"{config_name}.yaml", []))


def usual_value(schema: type, key: str) -> Any:
    """Return the value of a key in the shipped file; None for a name in a mapping, which takes any."""
    try:
        return value_of(shipped(SHIPPED[schema]).values, key)
    except (KeyError, TypeError):
        if key in tree(schema):
            raise
        return None


def composed(file: Path, arguments: list[str]) -> DictConfig:
    """Compose a file, the files in its defaults, and overrides. Raises ConfigError."""
    state = files_state(file.parent) | files_state(CONF)
    values = [text for text in arguments if text.startswith("++") and not text.startswith("++hydra.")]
    choices = tuple(text for text in arguments if text not in values)
    with suppress(HydraException, OmegaConfBaseException):  # Hydra itself reports the error
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
    """Compose by Hydra, which takes long; cached for files in this `state`, for the next run of a sweep."""
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
    """Load another system's YAML file and its defaults in the same directory; `overrides` win. Raises ConfigError."""
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
    """Values with every ${reference} resolved; faults for references that cannot be resolved."""
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
            missing = re.search(r"([^.']*)' not found", cause)
            refers = missing is not None and missing[1] not in str(written)
            reported = any(finding is not None and finding.cause == cause for finding in plain.faults.values())
            plain.faults[key] = None if refers or reported else Finding("value", "error", (key,), show(written), cause)
    return plain


@dataclass(frozen=True)
class Argument:
    """One argument of a command: its key, and its value, as written (`raw`) and parsed."""

    text: str
    key: str
    raw: str
    value: Any
    deletes: bool = False
    adds: bool = False
    package: str | None = None


def key_of(text: str) -> str:
    """The key of an argument, as written."""
    return text.lstrip("+~").partition("=")[0]


@functools.lru_cache(maxsize=4096)
def read_argument(text: str) -> Argument:
    """Read `key=value` in Hydra's grammar. Raises ConfigError."""
    key, equals, raw = text.partition("=")
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        cause = f"cannot read {text}: expected "
        if not equals or not key.strip("+~").replace(".", "").isidentifier():
            raise ConfigError(cause + "key=value") from error
        quoted = raw.replace("\\", "\\\\").replace('"', '\\"')
        raise ConfigError(f"""{cause}a value, or one in quotes: '{key}="{quoted}"'""") from error
    if not override.key_or_group:
        raise ConfigError(f"cannot read {text}: expected key=value")
    if override.is_sweep_override():
        fix = f"for a list write {key}=[{raw}]; " if "(" not in raw else ""
        raise ConfigError(f"{text}: one value is expected", fix=f"{fix}hybridrl sweep runs each value", keys=key)
    adds = override.is_add() or override.is_force_add()
    return Argument(text, override.key_or_group, raw, override.value(), override.is_delete(), adds, override.package)


@dataclass
class Overrides:
    """Hydra's overrides, and the source argument of each key."""

    schema: type
    findings: Findings
    arguments: list[str] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)

    def set(self, key: str, value: str, written: str) -> None:
        # "++" sets existing keys and adds missing ones; a whole section is chosen by the name of its file.
        self.arguments.append(f"{'++' if '.' in key else ''}{key}={value}")
        self.written[key] = written

    def add(self, argument: Argument, written: str) -> None:
        """Add one argument; `written`: its text in the command, empty to check it by its value. Raises ConfigError for
        an argument of a wrong form."""
        key, raw, keys = argument.key, argument.raw, tree(self.schema)
        if key == PRESET or (key == "algorithm" and raw in presets()):
            self.arguments.append(f"+{PRESET}={raw}")
            self.written[PRESET] = written
        elif key.startswith(("hydra.", "hydra/")) and key not in ("hydra/launcher", "hydra/sweeper"):
            self.findings.warn("ignored-key", f"{key} has no effect: Hydra only reads the configuration here", keys=key)
        elif argument.package or not written or (argument.deletes and key not in keys):
            self.arguments.append(argument.text)
        elif argument.deletes:  # a key that may be null becomes null
            if type(None) not in get_args(keys[key]):
                raise ConfigError(f"{written}: this key must have a value", fix="set it to another one")
            self.set(key, "null", written)
        elif holds(keys, key):
            if "." not in key and not isinstance(argument.value, str):
                raise ConfigError(
                    f"{written}: {key} is a section", fix=f"set the keys in it one by one: {key}.key=value"
                )
            self.set(key, raw, written)
        elif argument.adds and "." in key:
            self.findings.info("own-key", f"{key} is kept as {OWN}.{key} for your own code", keys=key)
            self.set(f"{OWN}.{key}", raw, written)
        else:
            self._add_unknown(key)

    def _add_unknown(self, key: str) -> None:
        section = key.replace("/", ".")
        if key.startswith("hydra/"):
            cause, fix = f"{key}: Hydra only reads the configuration here", "hybridrl sweep runs several values"
            self.findings.error("unsupported", cause, fix, keys=key)
        else:
            one_by_one = f"set its keys one by one, as {section}.key=value"
            fix = one_by_one if section != key else nearest_keys(key, self.schema)
            self.findings.error("unknown-key", f"unknown key {key}", fix, keys=key)


def parse_overrides(
    overrides: list[str],
    schema: type,
    findings: Findings,
    around: Mapping[str, Any] | None = None,
    translation: Any = None,
) -> Overrides:
    """Sort the arguments of a command line; unknown keys are errors. `around`: values of a custom file, by key;
    `translation`: translation of other systems' keys, by default verl's."""
    parsed, arguments = Overrides(schema, findings), list[tuple[Argument, str]]()
    for text in overrides:
        with findings.gathered("syntax"):
            arguments.append((read_argument(text), text))
    if not all(_is_own(argument.key, argument.value, tree(schema)) for argument, _ in arguments):
        translation = translation or plugins.load("translation")
        command = translation.translate([argument for argument, _ in arguments], schema, around or {})
        findings.add(*command.findings.items)
        arguments = [(read_argument(text), written) for text, written in command.arguments]
    for argument, written in arguments:
        with findings.gathered("syntax"):
            parsed.add(argument, written)
    return parsed


def _is_own(key: str, value: Any, keys: dict[str, Any]) -> bool:
    """Whether a key certainly belongs to hybridrl. Sections (verl's commands choose them) and names in mappings may
    not."""
    other = key == PRESET or key.startswith(("hydra.", "hydra/", f"{OWN}."))
    plain = key in keys and not dataclasses.is_dataclass(keys[key])
    return other or (plain and (not key.endswith(".strategy") or str(value).startswith("fsdp")))  # or verl's engine


def split_sweep(overrides: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Separate arguments with one value from Hydra's forms of several: `key=a,b`, `key=choice(a,b)`, `key=range(0,4)`.
    Several values are returned by key, as texts. Raises ConfigError."""
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


def plain_values(
    file: Path,
    schema: type,
    arguments: list[str],
    findings: Findings,
    translation: Any = None,
    needed: type | None = None,
) -> Plain:
    """The values of a configuration file with overrides. Raises ConfigError, also if a section of `needed` (by default
    the schema) is missing.

    Old names in a custom file, and keys without effect, are treated as overrides before those of the command line,
    which win.
    """
    keys, values, first, idle = tree(schema), custom_values(file), [], []
    foreign = [key for key, value in values.items() if value != MISSING and not _is_own(key, value, keys)]
    if foreign:
        translation = translation or plugins.load("translation")
        texts = {key: as_override(values[key]) for key in foreign}
        of_file = [Argument(f"++{key}={raw}", key, raw, values[key]) for key, raw in texts.items()]
        command = translation.translate(of_file, schema, values, of_file=True)
        findings.add(*command.findings.items)
        first = [text for text, _ in command.arguments if holds(keys, key_of(text))]
        idle = {key for key in foreign if holds(keys, key)} - {*map(key_of, first)}
    plain = resolved(composed(file, [*first, *arguments]))
    for key in idle:  # names in a mapping; Hydra cannot delete null values
        section, _, name = key.rpartition(".")
        value_of(plain.values, section).pop(name, None)
    if missing := [name for name in hints(needed or schema) if name not in plain.values]:
        fix = f"begin it with defaults: [{SHIPPED[schema]}, _self_]"
        raise ConfigError(f"{file} has no {', '.join(missing)}", fix=fix)
    return plain


def custom_values(file: Path) -> dict[str, Any]:
    """The values of a custom file and its defaults, by key; empty for a shipped file. Raises ConfigError."""
    return {} if file.parent == CONF else written_in(file, files_state(file.parent))


@functools.lru_cache(maxsize=1)
def written_in(file: Path, state: frozenset) -> dict[str, Any]:
    """The values of a custom file and its defaults, by key; cached for files in this `state`, for the next run of a
    sweep."""
    return leaves(cast(dict, OmegaConf.to_container(composed(file, []))))


def files_state(directory: Path) -> frozenset[tuple[Path, int]]:
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

"""Hydra's files and overrides -> one typed configuration. The only module that knows Hydra and OmegaConf."""

import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, cast, get_origin

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from hybridrl.config.checks import settle_ppo, settle_sft
from hybridrl.config.error import ConfigError, Refusals
from hybridrl.config.names import current_name, hints, tree, unknown_key, value_keys
from hybridrl.config.read import MISSING, Plain, read, show
from hybridrl.config.schema import PPOConfig
from hybridrl.config.schema_sft import SFTConfig

T = TypeVar("T")
Note = Callable[[str], None]

PACKAGE = Path(__file__).resolve().parent.parent
# Inside a wheel conf/ lies in the package, in a checkout beside it.
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"
REFERENCE = re.compile(r"\$\{([\w.]+)\}")
SHIPPED = {PPOConfig: "ppo_trainer", SFTConfig: "sft_trainer"}


def load_ppo_config(
    overrides: list[str],
    *,
    config_name: str = SHIPPED[PPOConfig],
    config_dir: Path = CONF,
    note: Note = lambda text: None,
) -> PPOConfig:
    """The configuration of `main_ppo`; remarks for the user go to `note`. Raises ConfigError."""
    config = _load(PPOConfig, overrides, config_name, config_dir, note)
    settle_ppo(config, note)
    return config


def load_sft_config(
    overrides: list[str],
    *,
    config_name: str = SHIPPED[SFTConfig],
    config_dir: Path = CONF,
    note: Note = lambda text: None,
) -> SFTConfig:
    """The configuration of `main_sft`; remarks for the user go to `note`. Raises ConfigError."""
    config = _load(SFTConfig, overrides, config_name, config_dir, note)
    settle_sft(config, note)
    return config


def save_config(config: PPOConfig | SFTConfig, path: Path) -> None:
    """Write the resolved configuration as YAML that `--config-path` takes back."""
    path.write_text(as_yaml(config), encoding="utf-8")


def as_yaml(config: PPOConfig | SFTConfig) -> str:
    return OmegaConf.to_yaml(as_dict(config))


def as_dict(config: PPOConfig | SFTConfig) -> dict[str, Any]:
    return asdict(config)


def shipped(config_name: str) -> Plain:
    """The values of a shipped configuration without any override; "???" where one must be set."""
    return _resolved(_composed(CONF / f"{config_name}.yaml", []))


def _load(schema: type[T], overrides: list[str], name: str, directory: Path, note: Note) -> T:
    wrong = Refusals()
    arguments = _arguments(schema, overrides, note, wrong)
    try:
        file = _existing(name, directory)
        plain = _resolved(_composed(file, arguments))
        if absent := [name for name in hints(schema) if name not in plain.values]:
            way_out = f"begin it with defaults: [{SHIPPED[schema]}, _self_]"
            raise ConfigError(f"{file} has no {', '.join(absent)}; {way_out}")
        config = read(schema, plain, str(file), wrong)
    except ConfigError as error:
        wrong.add(str(error))
    wrong.close()
    return config


def _arguments(schema: type, overrides: list[str], note: Note, wrong: Refusals) -> list[str]:
    """Overrides as Hydra takes them, old names moved to present ones; what is no key is refused."""
    known = tree(schema)
    free = tuple(key + "." for key, hint in known.items() if get_origin(hint) is dict)
    arguments: list[str] = []
    for text in overrides:
        try:
            override = _parse(text)
        except ConfigError as error:
            wrong.add(str(error))
            continue
        key = cast(str, override.key_or_group)
        new = key if key in known else current_name(key)
        if key.startswith("hydra."):
            note(f"{key} has no effect: Hydra only reads the configuration here")
        elif override.package:
            arguments.append(text)
        elif new not in known and not new.startswith(free):
            wrong.add(unknown_key(key, value_keys(schema)))
        elif "." not in new and not isinstance(override.value(), str):
            wrong.add(f"{text}: {new} is a section; set the keys in it one by one: {new}.key=value")
        else:
            if new != key:
                note(f"{key} is now {new}")
            # "++" sets what is there and adds what is not; a whole section is chosen by the name of its file.
            arguments.append(("++" if "." in new else "") + f"{new}={text.split('=', 1)[1]}")
    return arguments


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
    if override.is_delete():
        raise ConfigError(f"{text}: a key cannot be deleted; set it to another value")
    return override


def _composed(file: Path, arguments: list[str]) -> DictConfig:
    """What Hydra makes of a file, those it lists, and overrides. Raises ConfigError."""
    if file.parent != CONF:
        arguments = [*arguments, f"hydra.searchpath=['file://{CONF}']"]
    try:
        with initialize_config_dir(config_dir=str(file.parent), version_base="1.3"):
            return compose(config_name=file.stem, overrides=arguments)
    except MissingConfigException as error:
        missing = "=".join((error.missing_cfg_file or "").rsplit("/", 1))
        choices = f"; choose {' | '.join(error.options)}" if error.options else ""
        raise ConfigError(f"{missing}: there is no such file of settings{choices}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}, or a file it lists, is not YAML: {' '.join(str(error).split())}") from error
    except (HydraException, OmegaConfBaseException, OSError, ValueError) as error:
        raise ConfigError(f"{file}: {str(error).strip().splitlines()[0]}") from error


def _existing(name: str, directory: Path) -> Path:
    if not directory.is_dir():
        raise ConfigError(f"--config-path={directory}: there is no such directory")
    file = directory / f"{name.removesuffix('.yaml')}.yaml"
    if not file.is_file():
        names = ", ".join(sorted(other.stem for other in directory.glob("*.yaml"))) or "none"
        raise ConfigError(f"--config-name={name}: there is no {file}; files there: {names}")
    return file.resolve()


def _resolved(composed: DictConfig) -> Plain:
    """Values with every ${reference} followed. Raises ConfigError for those that lead nowhere."""
    wrong, follows = Refusals(), {}
    values = _followed(composed, "", follows, wrong)
    wrong.close()
    return Plain(values, follows)


def _followed(node: DictConfig, place: str, follows: dict[str, str], wrong: Refusals) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, written in cast(dict, OmegaConf.to_container(node)).items():
        key = f"{place}{name}"
        if (reference := REFERENCE.fullmatch(str(written))) is not None:
            beside = reference[1].startswith(".")  # .name is a key of the same section
            follows[key] = f"{place}{reference[1][1:]}" if beside else reference[1]
        try:
            value = MISSING if written == MISSING else node[name]
            if isinstance(value, DictConfig):
                value = _followed(value, f"{key}.", follows, wrong)
            elif isinstance(value, ListConfig):
                value = OmegaConf.to_container(value, resolve=True)
            found[name] = value
        except InterpolationToMissingValueError:
            found[name] = MISSING
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            if not any(line.endswith(reason) for line in wrong.lines):  # others may refer to this one in turn
                wrong.add(f"{key}={show(written)}: {reason}")
    return found

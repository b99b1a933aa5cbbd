"""Hydra's files and overrides -> one typed configuration. The only module that knows Hydra and OmegaConf."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridrl.config.checks import settle_ppo, settle_sft
from hybridrl.config.error import ConfigError
from hybridrl.config.names import current_name, leaves, nearest
from hybridrl.config.schema import PPOConfig, SFTConfig

T = TypeVar("T")
Note = Callable[[str], None]

PACKAGE = Path(__file__).resolve().parent.parent
# Inside a wheel conf/ lies in the package, in a checkout beside it.
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"


def load_ppo_config(
    overrides: list[str],
    *,
    config_name: str = "ppo_trainer",
    config_dir: Path = CONF,
    note: Note = lambda text: None,
) -> PPOConfig:
    """The configuration of `main_ppo`; remarks for the user go to `note`. Raises ConfigError."""
    config = _compose(PPOConfig, overrides, config_name, config_dir, note)
    settle_ppo(config, note)
    return config


def load_sft_config(
    overrides: list[str],
    *,
    config_name: str = "sft_trainer",
    config_dir: Path = CONF,
    note: Note = lambda text: None,
) -> SFTConfig:
    """The configuration of `main_sft`; remarks for the user go to `note`. Raises ConfigError."""
    config = _compose(SFTConfig, overrides, config_name, config_dir, note)
    settle_sft(config, note)
    return config


def save_config(config: PPOConfig | SFTConfig, path: Path) -> None:
    """Write the resolved configuration as YAML that `--config-path` takes back."""
    path.write_text(as_yaml(config))


def as_yaml(config: PPOConfig | SFTConfig) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def as_dict(config: PPOConfig | SFTConfig) -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.structured(config)))


def _compose(schema: type[T], overrides: list[str], name: str, directory: Path, note: Note) -> T:
    arguments = _arguments(schema, overrides, note)
    if directory.resolve() != CONF:
        arguments.append(f"hydra.searchpath=[file://{CONF}]")
    try:
        with initialize_config_dir(config_dir=str(directory.resolve()), version_base="1.3"):
            plain = compose(config_name=name, overrides=arguments)
        typed = OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.to_container(plain, resolve=False))
        missing = sorted(OmegaConf.missing_keys(typed))
        if missing:
            raise ConfigError("no value for " + ", ".join(missing) + f"; add {missing[0]}=... to the command")
        return cast(T, OmegaConf.to_object(typed))
    except HydraException as error:
        raise ConfigError(_first_line(error)) from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'configuration'}: {_first_line(error)}") from error


def _arguments(schema: type, overrides: list[str], note: Note) -> list[str]:
    """Overrides with old names moved to present ones and every key known; raises ConfigError naming each other key."""
    known = dict(leaves(schema))
    sections = {key.split(".")[0] for key in known}
    free = [key + "." for key, is_free in known.items() if is_free]
    arguments, unknown = [], []
    for text in overrides:
        override = _parse(text)
        key = override.key_or_group
        new = current_name(key) if key not in known else key
        if new != key and (new in known or new.startswith(tuple(free))):
            note(f"{key} is now {new}")
        else:
            new = key
        if new in sections or key.startswith("hydra."):
            arguments.append(text)
        elif new in known:
            arguments.append(f"{new}={_value(text)}")
        elif new.startswith(tuple(free)):
            arguments.append(f"++{new}={_value(text)}")
        else:
            unknown.append(_unknown(key, list(known)))
    if unknown:
        raise ConfigError("\n".join(unknown))
    return arguments


def _parse(text: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError(
            f"cannot read {text!r}: expected key=value (quote values that hold , : = or spaces)"
        ) from error
    if override.is_delete() or override.is_sweep_override():
        raise ConfigError(f"{text!r}: keys cannot be deleted or swept here; set one value: key=value")
    return override


def _value(text: str) -> str:
    return text.split("=", 1)[1]


def _unknown(key: str, known: list[str]) -> str:
    names = nearest(key, known)
    return f"unknown key {key}" + (f"; nearest: {', '.join(names)}" if names else "; --help lists all keys")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]

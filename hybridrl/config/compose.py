"""Hydra's files and overrides -> plain nested values. Only this module and overrides.py use Hydra."""

import functools
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from hybridrl.config.findings import ConfigError, Finding, show
from hybridrl.config.schema import PPOConfig, SFTConfig
from hybridrl.config.values import MISSING, Plain

PACKAGE = Path(__file__).resolve().parent.parent
# In a wheel conf/ is inside the package, in a checkout next to it.
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"
REFERENCE = re.compile(r"\$\{([\w.]+)\}")
SHIPPED = {PPOConfig: "ppo_trainer", SFTConfig: "sft_trainer"}


def save_config(config: PPOConfig | SFTConfig, path: Path) -> None:
    """Write the resolved configuration as YAML that `--config-path` can load."""
    path.write_text(as_yaml(config), encoding="utf-8")


def as_yaml(config: PPOConfig | SFTConfig) -> str:
    return OmegaConf.to_yaml(as_dict(config))


def as_dict(config: PPOConfig | SFTConfig) -> dict[str, Any]:
    return asdict(config)


def as_section(values: dict[str, Any]) -> DictConfig:
    """Plain values as a custom class expects a section: by attribute, by name, and by `get` with a default."""
    return OmegaConf.create(values)


@functools.cache
def shipped(config_name: str) -> Plain:
    """The values of a shipped configuration without any override; "???" where one must be set."""
    return resolved(composed(CONF / f"{config_name}.yaml", []))


def composed(file: Path, arguments: list[str]) -> DictConfig:
    """Compose a file, those it lists, and overrides. Raises ConfigError."""
    if file.parent != CONF:
        arguments = [*arguments, f"hydra.searchpath=['file://{CONF}']"]
    try:
        with initialize_config_dir(config_dir=str(file.parent), version_base="1.3"):
            return compose(config_name=file.stem, overrides=arguments)
    except MissingConfigException as error:
        missing = "=".join((error.missing_cfg_file or "").rsplit("/", 1))
        fix = f"choose {' | '.join(error.options)}" if error.options else ""
        raise ConfigError(f"{missing}: there is no such configuration file", fix=fix) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}, or a file it lists, is not YAML: {' '.join(str(error).split())}") from error
    except (HydraException, OmegaConfBaseException, OSError, ValueError) as error:
        raise ConfigError(f"{file}: {str(error).strip().splitlines()[0]}") from error


def existing(name: str, directory: Path) -> Path:
    if not directory.is_dir():
        raise ConfigError(f"--config-path={directory}: there is no such directory")
    file = directory / f"{name.removesuffix('.yaml')}.yaml"
    if not file.is_file():
        names = ", ".join(sorted(other.stem for other in directory.glob("*.yaml"))) or "none"
        raise ConfigError(f"--config-name={name}: there is no {file}", fix=f"files there: {names}")
    return file.resolve()


def plain_values(composed: DictConfig) -> dict[str, Any]:
    """Nested values with their ${references} as written."""
    return cast(dict, OmegaConf.to_container(composed))


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


def resolved(composed: DictConfig) -> Plain:
    """Values with every ${reference} resolved; those that cannot be resolved are among the faults."""
    plain = Plain({}, {}, {})
    plain.values.update(_resolved(composed, "", plain))
    return plain


def _resolved(node: DictConfig, place: str, plain: Plain) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, written in cast(dict, OmegaConf.to_container(node)).items():
        key = f"{place}{name}"
        if (reference := REFERENCE.fullmatch(str(written))) is not None:
            target = reference[1].lstrip(".")
            dots = len(reference[1]) - len(target)  # .name is a key of the same section, ..name of the one around it
            plain.follows[key] = f"{place.rsplit('.', dots)[0]}.{target}" if dots else target
        try:
            value = MISSING if written == MISSING else node[name]
            if isinstance(value, DictConfig):
                value = _resolved(value, f"{key}.", plain)
            elif isinstance(value, ListConfig):
                value = OmegaConf.to_container(value, resolve=True)
            values[name] = value
        except InterpolationToMissingValueError:
            values[name] = MISSING
        except OmegaConfBaseException as error:
            values[name], cause = MISSING, str(error).splitlines()[0]
            # Other keys may refer to this one in turn, and fail for the same reason.
            known = any(finding is not None and finding.cause == cause for finding in plain.faults.values())
            plain.faults[key] = None if known else Finding("value", "error", (key,), show(written), cause)
    return values

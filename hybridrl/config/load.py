"""From a command line to a typed configuration, with all findings at once.

`resolve_config` collects them; `load_config`, with which a run starts, raises.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from hybridrl.config.checks import resolve_ppo, resolve_sft
from hybridrl.config.checks.training import Machine, this_machine
from hybridrl.config.compose import (
    CONF,
    SHIPPED,
    custom_values,
    nearest_keys,
    parse_overrides,
    plain_values,
    usual_value,
)
from hybridrl.config.findings import ConfigError, Findings
from hybridrl.config.help import changed_values
from hybridrl.config.schema import PPOConfig, SFTConfig
from hybridrl.config.values import Plain, Reading, holds, leaves, tree
from hybridrl.runs import plugins

T = TypeVar("T")
Report = Callable[[str], None]


@dataclass
class ResolvedConfig(Generic[T]):
    """`config` may be used if there are no errors; `written` maps each key set on the command line to its argument.
    `rejected` are the keys whose values were replaced by shipped ones."""

    findings: Findings
    config: T | None = None
    values: Plain | None = None
    written: dict[str, str] = field(default_factory=dict)
    rejected: set[str] = field(default_factory=set)

    def cross_check(self, check: Callable[[T, Findings], None]) -> None:
        """Add the findings of a check of keys against one another, without what follows from a rejected value."""
        assert self.config is not None
        crossed = Findings()
        check(self.config, crossed)
        self.findings.add(*(finding for finding in crossed.items if not self.rejected & {*finding.keys}))

    def accept(self, report: Report | None = None, show: Report | None = None) -> T:
        """Pass warnings to `report` and information to `show`, and return the configuration. Raises ConfigError."""
        for finding in self.findings.items:
            to = {"warning": report, "info": show}.get(finding.severity)
            if to is not None:
                to(finding.text)
        self.findings.close(self.config)
        assert self.config is not None
        return self.config


def load_config(
    schema: type[T],
    overrides: list[str],
    *,
    config_name: str = "",
    config_dir: Path = CONF,
    report: Report | None = None,
    show: Report | None = None,
) -> T:
    """The configuration with which a run starts; warnings go to `report`, information and what differs from the default
    configuration to `show`. Raises ConfigError."""
    result = resolve_config(schema, overrides, config_name or SHIPPED[schema], config_dir)
    config = result.accept(report, show)
    if show is not None and result.values is not None:
        show(changed_values(config, result.values))
    return config


load_ppo_config = functools.partial(load_config, PPOConfig)
load_sft_config = functools.partial(load_config, SFTConfig)


def existing(name: str, directory: Path) -> Path:
    if not directory.is_dir():
        raise ConfigError(f"--config-path={directory}: there is no such directory")
    file = directory / f"{name.removesuffix('.yaml')}.yaml"
    if not file.is_file():
        names = ", ".join(sorted(other.stem for other in directory.glob("*.yaml"))) or "none"
        raise ConfigError(f"--config-name={name}: there is no {file}", fix=f"files there: {names}")
    return file.resolve()


def resolve_config(
    schema: type[T],
    overrides: list[str],
    name: str,
    directory: Path = CONF,
    *,
    offline: bool = False,
    translation: Any = None,
) -> ResolvedConfig[T]:
    """Compose, read and check a configuration, and fill in derived values. `offline`: for another machine, so that the
    devices, files and directories of this one do not count. `translation`: of keys that are not hybridrl's."""
    result = read_config(schema, overrides, name, directory, offline=offline, translation=translation)
    if result.config is None:
        return result
    machine = None
    if offline:  # another machine, with whatever the configuration requests
        gpus = _gpus(result.config)
        machine = Machine(gpus, gpus, sys.maxsize, here=False) if gpus else replace(this_machine(), here=False)
    resolve: Any = resolve_ppo if schema is PPOConfig else resolve_sft
    result.cross_check(functools.partial(resolve, machine=machine))
    return result


def read_config(
    schema: type[T],
    overrides: list[str],
    name: str = "",
    directory: Path = CONF,
    *,
    offline: bool = False,
    translation: Any = None,
) -> ResolvedConfig[T]:
    """Compose and read a configuration, of which only each value by itself is checked. A schema may have some of the
    sections and keys of PPOConfig: the others may be set, and are not read."""
    whole: type = schema if schema in SHIPPED else PPOConfig
    name, findings, around = name or SHIPPED[whole], Findings(), {}
    with findings.gathered("file"):
        around = custom_values(existing(name, directory))
    parsed = parse_overrides(overrides, whole, findings, around, translation)
    result: ResolvedConfig[T] = ResolvedConfig(findings, written=parsed.written)
    with findings.gathered("file"):
        file = existing(name, directory)
        result.values = plain_values(file, whole, parsed.arguments, findings, translation, schema)
    if result.values is None:
        return result
    # The shipped values are composed only if one is wanted: that takes as long as all the rest.
    reading = Reading(schema, result.values, functools.partial(usual_value, whole), offline=offline)
    findings.add(*reading.findings.items)
    reported, known = result.values.faults, tree(whole)
    foreign = {key: value for key, value in reading.foreign.items() if key not in reported and not holds(known, key)}
    if foreign:  # from the command line or the file
        translation = translation or plugins.load("translation")
        found, unknown = translation.check(foreign, leaves(result.values.values), whole)
        for key in unknown:
            findings.error("unknown-key", f"unknown key {key} in {file}", nearest_keys(key, whole), keys=key)
        findings.add(*found)
    result.config, result.rejected = reading.config, reading.rejected
    return result


def _gpus(config: object) -> int:
    """The GPUs per machine that a configuration requests, if only for one engine; 0: none."""
    assert isinstance(config, PPOConfig | SFTConfig)
    width = config.actor_rollout_ref.rollout.tensor_model_parallel_size if isinstance(config, PPOConfig) else 1
    return config.trainer.n_gpus_per_node or (width if width > 1 else 0)

"""From a command line to a typed configuration, with all findings at once.

`resolve_config` collects them; `load_config`, with which a run starts, raises.
"""

import collections
import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from hybridrl.config.checks import resolve_ppo, resolve_sft
from hybridrl.config.checks.training import Machine, this_machine
from hybridrl.config.combined import computed
from hybridrl.config.compose import (
    CONF,
    SHIPPED,
    custom_values,
    parse_overrides,
    plain_values,
    usual_value,
)
from hybridrl.config.findings import ConfigError, Findings
from hybridrl.config.findings import show as shown
from hybridrl.config.help import changed_values
from hybridrl.config.keys import TRANSLATED, Entry, current_name, entry_of, holds, nearest_keys, tree
from hybridrl.config.schema import PPOConfig, SFTConfig
from hybridrl.config.values import Plain, Reading, leaves

SHOWN = 4  # keys that are named if more share a reason

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
    schema: type[T], overrides: list[str], name: str, directory: Path = CONF, *, offline: bool = False
) -> ResolvedConfig[T]:
    """Compose, read and check a configuration, and fill in derived values. `offline`: for another machine, so that the
    devices, files and directories of this one do not count."""
    result, machine = read_config(schema, overrides, name, directory, offline=offline), None
    if result.config is None:
        return result
    if offline:  # another machine, with whatever the configuration requests
        gpus = _gpus(result.config)
        machine = Machine(gpus, gpus, sys.maxsize, here=False) if gpus else replace(this_machine(), here=False)
    resolve: Any = resolve_ppo if schema is PPOConfig else resolve_sft
    result.cross_check(functools.partial(resolve, machine=machine))
    return result


def read_config(
    schema: type[T], overrides: list[str], name: str = "", directory: Path = CONF, *, offline: bool = False
) -> ResolvedConfig[T]:
    """Compose and read a configuration, of which only each value by itself is checked. A schema may have some of the
    sections and keys of PPOConfig: the others may be set, and are not read."""
    whole: type = schema if schema in SHIPPED else PPOConfig
    name, findings, around = name or SHIPPED[whole], Findings(), {}
    with findings.gathered("file"):
        around = custom_values(existing(name, directory))
    parsed = parse_overrides(overrides, whole, findings, around)
    result: ResolvedConfig[T] = ResolvedConfig(findings, written=parsed.written)
    with findings.gathered("file"):
        file = existing(name, directory)
        result.values = plain_values(file, whole, parsed.arguments, findings)
    if result.values is None:
        return result
    # The shipped values are composed only if one is wanted: that takes as long as all the rest.
    reading = Reading(schema, result.values, functools.partial(usual_value, whole), offline=offline)
    findings.add(*reading.findings.items)
    foreign = {key: value for key, value in reading.foreign.items() if not holds(tree(whole), key)}
    _check_foreign(foreign, result.values, whole, str(file), findings)
    result.config, result.rejected = reading.config, reading.rejected
    return result


def _gpus(config: object) -> int:
    """The GPUs per machine that a configuration requests, if only for one engine; 0: none."""
    assert isinstance(config, PPOConfig | SFTConfig)
    width = config.actor_rollout_ref.rollout.tensor_model_parallel_size if isinstance(config, PPOConfig) else 1
    return config.trainer.n_gpus_per_node or (width if width > 1 else 0)


def _check_foreign(foreign: dict[str, Any], plain: Plain, schema: type, source: str, findings: Findings) -> None:
    """Report keys that hybridrl does not have, from the command line or a file, by their effect in verl."""
    shared, known = collections.defaultdict[Entry, list[str]](list), tree(schema)  # one reason holds for several keys
    values = leaves(plain.values)
    for key, value in foreign.items():
        new = current_name(key)
        entry = entry_of(new, value)
        if key in plain.faults or holds(known, new) or (entry and entry.kind in TRANSLATED):
            continue  # reported or renamed before
        if entry is None:
            findings.error("unknown-key", f"unknown key {key} in {source}", nearest_keys(key, schema), keys=key)
        elif not entry.is_silent(value) and not _is_idle(entry, value, values):
            shared[entry].append(key)
    for entry, keys in sorted(shared.items(), key=lambda item: item[0].kind != "rejected"):
        more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
        if entry.kind == "rejected":
            cause = f"{', '.join(f'{key}={shown(foreign[key])}' for key in keys[:SHOWN])}{more}: {entry.why}"
            sets = (f"{key}={_computed(form, foreign[keys[0]], values)}" for key, form in entry.sets.items())
            fix = f"set {' '.join(sets)}" if entry.sets else ""
            findings.error("unsupported", cause, fix, keys=keys, value=shown(foreign[keys[0]]))
        else:
            cause = f"{', '.join(keys[:SHOWN])}{more} {'have' if keys[1:] else 'has'} no effect: {entry.why}"
            findings.warn("ignored-key", cause, keys=keys)


def _is_idle(entry: Entry, value: Any, values: Mapping[str, Any]) -> bool:
    """Whether a value says what other keys say, or another key is not as the entry wants it."""
    if any(values.get(key) != wanted for key, wanted in entry.only.items()):
        return True
    form = entry.follows or ""
    return value == (_computed(form, value, values) if "{" in form else values.get(form))


def _computed(form: str, value: Any, values: Mapping[str, Any]) -> Any:
    try:
        return computed(form, lambda name: value if name == "value" else values.get(name))
    except ValueError as error:  # shown as it is
        return error

"""From a command line to a typed configuration, with all findings at once.

`resolve_config` collects them; `load_ppo_config` and `load_sft_config`, with which a run starts, raise.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from hybridrl.config.checks import resolve_ppo, resolve_sft
from hybridrl.config.checks.training import Machine, this_machine
from hybridrl.config.compose import CONF, SHIPPED, composed, existing, plain_values, resolved, shipped
from hybridrl.config.findings import ConfigError, Finding, Findings, show
from hybridrl.config.keys import Entry, current_name, entry_of, hints, holds, nearest_keys, tree
from hybridrl.config.overrides import as_override, parse_overrides
from hybridrl.config.schema import PPOConfig, SFTConfig
from hybridrl.config.values import MISSING, Plain, Reading, leaves, value_of

SHOWN = 4  # keys that are named if more share a reason

T = TypeVar("T")
Report = Callable[[str], None]


@dataclass
class ResolvedConfig(Generic[T]):
    """`config` may be used if there are no errors; `written` maps each key set on the command line to its argument."""

    findings: Findings
    config: T | None = None
    values: Plain | None = None
    written: dict[str, str] = field(default_factory=dict)


def load_ppo_config(
    overrides: list[str],
    *,
    config_name: str = SHIPPED[PPOConfig],
    config_dir: Path = CONF,
    report: Report = lambda text: None,
) -> PPOConfig:
    """The configuration of `main_ppo`; warnings and information go to `report`. Raises ConfigError."""
    return _load(resolve_config(PPOConfig, overrides, config_name, config_dir), report)


def load_sft_config(
    overrides: list[str],
    *,
    config_name: str = SHIPPED[SFTConfig],
    config_dir: Path = CONF,
    report: Report = lambda text: None,
) -> SFTConfig:
    """The configuration of `main_sft`; warnings and information go to `report`. Raises ConfigError."""
    return _load(resolve_config(SFTConfig, overrides, config_name, config_dir), report)


def _load(resolved_config: ResolvedConfig[T], report: Report) -> T:
    for finding in resolved_config.findings.items:
        if finding.severity != "error":
            report(finding.text)
    resolved_config.findings.close()
    assert resolved_config.config is not None
    return resolved_config.config


def resolve_config(
    schema: type[T], overrides: list[str], name: str, directory: Path = CONF, *, offline: bool = False
) -> ResolvedConfig[T]:
    """Compose, read and check a configuration, and fill in derived values. `offline`: for another machine, so that the
    devices, files and directories of this one do not count."""
    findings = Findings()
    parsed = parse_overrides(overrides, schema, findings)
    result: ResolvedConfig[T] = ResolvedConfig(findings, written=parsed.written)
    with findings.gathered("file"):
        file = existing(name, directory)
        result.values = _composed(file, schema, parsed.arguments, findings)
    if (plain := result.values) is None:
        return result
    reading = Reading(schema, plain, lambda key: value_of(shipped(SHIPPED[schema]).values, key), offline=offline)
    findings.add(*reading.findings.items)
    _check_foreign(reading.foreign, plain, schema, str(file), findings)
    result.config = reading.config
    findings.add(*_checked(reading, offline))
    return result


def _composed(file: Path, schema: type, arguments: list[str], findings: Findings) -> Plain:
    plain = resolved(composed(file, [*_renamed(file, schema, findings), *arguments]))
    if missing := [name for name in hints(schema) if name not in plain.values]:
        fix = f"begin it with defaults: [{SHIPPED[schema]}, _self_]"
        raise ConfigError(f"{file} has no {', '.join(missing)}", fix=fix)
    return plain


def _renamed(file: Path, schema: type, findings: Findings) -> list[str]:
    """Overrides for old names, and for keys without effect, in a custom file: as on a command line, which comes after
    them and wins."""
    if file.parent == CONF:
        return []
    known, arguments, deleted = tree(schema), [], []
    for key, value in leaves(plain_values(composed(file, []))).items():
        new = current_name(key)
        entry = None if new in known else entry_of(new, value)
        renamed = (entry and entry.kind == "translated") or (new != key and holds(known, new))
        idle = entry and new == key and holds(known, key) and entry.concerns(value)
        if value != MISSING and (renamed or idle):
            arguments.append(f"++{key}={as_override(value)}")
            deleted += [f"~{key}"] * bool(idle)
    return [*parse_overrides(arguments, schema, findings).arguments, *deleted]


def _check_foreign(foreign: dict[str, Any], plain: Plain, schema: type, source: str, findings: Findings) -> None:
    """Report keys that hybridrl does not have, from the command line or a file, by their effect in verl."""
    ignored: dict[Entry, list[str]] = {}
    rejected: dict[Entry, list[str]] = {}
    known = tree(schema)
    for key, value in foreign.items():
        new = current_name(key)
        entry = entry_of(new, value)
        if key in plain.faults or holds(known, new) or (entry and entry.kind == "translated"):
            continue  # reported or renamed before
        if entry is None:
            findings.error("unknown-key", f"unknown key {key} in {source}", nearest_keys(key, schema), keys=key)
        elif entry.is_silent(value) or (entry.follows and value == value_of(plain.values, entry.follows)):
            continue
        else:
            (rejected if entry.kind == "rejected" else ignored).setdefault(entry, []).append(key)
    for entry, keys in rejected.items():
        settings = _some([f"{key}={show(foreign[key])}" for key in keys])
        findings.error("unsupported", f"{settings}: {entry.why}", keys=keys, value=show(foreign[keys[0]]))
    for entry, keys in ignored.items():
        cause = f"{_some(keys)} {'have' if keys[1:] else 'has'} no effect: {entry.why}"
        findings.warn("ignored-key", cause, keys=keys)


def _some(items: list[str]) -> str:
    """The first items of a long list; one reason holds for all."""
    return ", ".join(items[:SHOWN]) + (f" and {len(items) - SHOWN} more" if len(items) > SHOWN else "")


def _checked(reading: Reading, offline: bool) -> list[Finding]:
    """Resolve the configuration and return the findings, except those about keys whose value was rejected."""
    findings, config = Findings(), reading.config
    resolve = resolve_ppo if isinstance(config, PPOConfig) else resolve_sft
    resolve(config, findings, _machine_for(config) if offline else None)
    return [finding for finding in findings.items if not reading.rejected & {*finding.keys}]


def _machine_for(config: PPOConfig | SFTConfig) -> Machine:
    """Another machine, with whatever the configuration requests."""
    engine = config.actor_rollout_ref.rollout.tensor_model_parallel_size if isinstance(config, PPOConfig) else 1
    gpus = config.trainer.n_gpus_per_node or (engine if engine > 1 else 0)
    return Machine(gpus, gpus, sys.maxsize, here=False) if gpus else replace(this_machine(), here=False)

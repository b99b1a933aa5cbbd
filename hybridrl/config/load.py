"""From a command line to a typed configuration, and everything that is to be said of it: all at once.

`judge` says it; `load_*` are what a run starts with, and refuse.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from hybridrl.config.checks import settle_ppo, settle_sft
from hybridrl.config.compose import CONF, SHIPPED, composed, existing, plain_values, resolved, shipped
from hybridrl.config.error import ConfigError
from hybridrl.config.findings import Findings
from hybridrl.config.machine import Machine, this_machine
from hybridrl.config.names import hints, holds, tree, unknown_key, value_keys
from hybridrl.config.overrides import as_override, take
from hybridrl.config.read import MISSING, Plain, Reading, leaves, read, show
from hybridrl.config.schema import PPOConfig
from hybridrl.config.schema_sft import SFTConfig
from hybridrl.config.verl_keys import Entry, current_name, entry_of

SHOWN = 4  # keys that are named where more share a reason

T = TypeVar("T")
Note = Callable[[str], None]


class Settle(Protocol):
    def __call__(self, config: Any, note: Note, machine: Machine | None = None) -> None: ...


@dataclass
class Judgement(Generic[T]):
    """`config` may be used where nothing is refused; `written` says how the command line put each key it sets."""

    findings: Findings
    config: T | None = None
    values: Plain | None = None
    written: dict[str, str] = field(default_factory=dict)


def load_ppo_config(
    overrides: list[str],
    *,
    config_name: str = SHIPPED[PPOConfig],
    config_dir: Path = CONF,
    note: Note = lambda text: None,
) -> PPOConfig:
    """The configuration of `main_ppo`; remarks for the user go to `note`. Raises ConfigError."""
    return _load(judge(PPOConfig, overrides, config_name, config_dir), note)


def load_sft_config(
    overrides: list[str],
    *,
    config_name: str = SHIPPED[SFTConfig],
    config_dir: Path = CONF,
    note: Note = lambda text: None,
) -> SFTConfig:
    """The configuration of `main_sft`; remarks for the user go to `note`. Raises ConfigError."""
    return _load(judge(SFTConfig, overrides, config_name, config_dir), note)


def _load(judgement: Judgement[T], note: Note) -> T:
    for finding in judgement.findings.found:
        if finding.severity != "refused":
            note(finding.text)
    judgement.findings.close()
    assert judgement.config is not None
    return judgement.config


def judge(
    schema: type[T], overrides: list[str], name: str, directory: Path = CONF, *, elsewhere: bool = False
) -> Judgement[T]:
    """Compose, read and settle a configuration. `elsewhere`: for another machine, so that the devices, files and
    directories of this one do not count."""
    findings = Findings()
    judgement: Judgement[T] = Judgement(findings)
    taken = take(overrides, schema, findings)
    judgement.written = taken.written
    try:
        file = existing(name, directory)
        arguments = [*_renamed(file, schema, findings), *taken.arguments]
        plain = judgement.values = resolved(composed(file, arguments))
        if absent := [name for name in hints(schema) if name not in plain.values]:
            way_out = f"begin it with defaults: [{SHIPPED[schema]}, _self_]"
            raise ConfigError(f"{file} has no {', '.join(absent)}; {way_out}")
    except ConfigError as error:
        for line in error.lines:
            findings.refuse("file", line)
        return judgement
    reading = read(schema, plain, lambda key: _value(shipped(SHIPPED[schema]), key), elsewhere=elsewhere)
    _tell(reading, findings)
    _judge_foreign(reading.foreign, plain, schema, str(file), findings)
    judgement.config = reading.config
    _settle(judgement, reading, elsewhere)
    return judgement


def _renamed(file: Path, schema: type, findings: Findings) -> list[str]:
    """Overrides for what a file sets by names that have another one here, or that are left out: as on a command line,
    which follows and wins."""
    if file.parent == CONF:
        return []
    known, words, left_out = tree(schema), [], []
    for key, value in leaves(plain_values(composed(file, []))).items():
        new = current_name(key)
        entry = None if new in known else entry_of(new, value)
        renamed = (entry and entry.kind == "translated") or (new != key and holds(known, new))
        idle = entry and new == key and holds(known, key) and entry.concerns(value)
        if value != MISSING and (renamed or idle):
            words.append(f"++{key}={as_override(value)}")
            left_out += [f"~{key}"] * bool(idle)
    return [*take(words, schema, findings).arguments, *left_out]


def _tell(reading: Reading, findings: Findings) -> None:
    for line in filter(None, reading.refused.values()):
        findings.refuse("value", line)
    for line in reading.absent.values():
        findings.inform("not-here", line)
    for line in reading.empty:
        findings.warn("empty-value", line)


def _judge_foreign(foreign: dict[str, Any], plain: Plain, schema: type, source: str, findings: Findings) -> None:
    """Keys that are none here, from the command line or a file, by what they would do in verl."""
    ignored: dict[Entry, list[str]] = {}
    refused: dict[Entry, list[str]] = {}
    known = tree(schema)
    for key, value in foreign.items():
        new = current_name(key)
        entry = entry_of(new, value)
        if key in plain.faults:
            continue
        if holds(known, new) or (entry and entry.kind == "translated"):
            continue  # renamed before
        elif entry is None:
            findings.refuse("unknown-key", unknown_key(key, value_keys(schema), source))
        elif entry.is_silent(value) or (entry.follows and value == _value(plain, entry.follows)):
            continue
        elif entry.kind == "refused":
            refused.setdefault(entry, []).append(f"{key}={show(value)}")
        else:
            ignored.setdefault(entry, []).append(key)
    for entry, settings in refused.items():
        findings.refuse("unsupported", f"{_some(settings)}: {entry.why}")
    for entry, keys in ignored.items():
        findings.warn("ignored-key", f"{_some(keys)} {'have' if keys[1:] else 'has'} no effect: {entry.why}")


def _some(items: list[str]) -> str:
    """Not all of a long list: one reason holds for all."""
    return ", ".join(items[:SHOWN]) + (f" and {len(items) - SHOWN} more" if len(items) > SHOWN else "")


def _settle(judgement: Judgement, reading: Reading, elsewhere: bool) -> None:
    """Judge keys against one another. What speaks of a key whose value was refused waits until that one is mended."""
    findings, refused = judgement.findings, reading.refused
    settle: Settle = settle_ppo if isinstance(judgement.config, PPOConfig) else settle_sft
    machine = _machine_for(judgement.config) if elsewhere else None
    said: list[str] = []
    try:
        settle(judgement.config, said.append, machine)
    except ConfigError as error:
        for line in error.lines:
            if not any(key in line for key in refused):
                findings.refuse("conflict", line)
    for line in said:
        if not any(key in line for key in refused):
            findings.warn("setting", line)


def _machine_for(config: Any) -> Machine:
    """Another machine, that has whatever the configuration asks for."""
    engine = config.actor_rollout_ref.rollout.tensor_model_parallel_size if isinstance(config, PPOConfig) else 1
    gpus = config.trainer.n_gpus_per_node or (engine if engine > 1 else 0)
    return Machine(gpus, gpus, sys.maxsize, here=False) if gpus else replace(this_machine(), here=False)


def _value(plain: Plain, key: str) -> Any:
    value: Any = plain.values
    for name in key.split("."):
        value = value[name]
    return value

"""A run's configuration next to the shipped one: what differs, what set it, and what each key means."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.config import ConfigError
from hybridrl.config.compose import CONF, shipped
from hybridrl.config.findings import show
from hybridrl.config.help import key_meanings
from hybridrl.config.values import MISSING, leaves
from hybridrl.report.contents import Contents


@dataclass(frozen=True)
class Setting:
    """A key that differs from the default; `source` is empty if it was certainly set."""

    key: str
    value: str
    default: str
    source: str
    meaning: str


def settings(contents: Contents) -> list[Setting]:
    """Return the keys that differ from the shipped configuration: set ones first, then derived ones. Those that merely
    follow another key are left out."""
    if not contents.config:
        return []
    name = "sft_trainer" if contents.supervised else "ppo_trainer"
    try:
        usual, meanings = shipped(name), key_meanings(CONF / f"{name}.yaml")
    except (ConfigError, OSError):
        return []
    values, defaults = leaves(contents.config), leaves(usual.values)
    rows = []
    for key, value in values.items():
        default, followed = defaults.get(key, MISSING), usual.follows.get(key)
        if value in (default, [default]) or (value in ([], {}) and default is None):
            continue
        if key.startswith("critic.") and values.get("critic.enable") is False:
            continue
        if followed in values and values[followed] == value:
            continue
        source = "set, or derived for model and machine" if default is None else ""
        if key not in defaults:
            source = "no key of this version"
        expected = f"as {followed}" if followed else "must be set" if default == MISSING else show(default)
        rows.append(Setting(key, show(value), expected, source, meanings.get(key, "")))
    return sorted(rows, key=lambda row: bool(row.source))


def differences(runs: Sequence[Contents]) -> list[tuple[str, list[str]]]:
    """Return the keys in which runs differ, with the value of each run; without directories."""
    flat = [leaves(one.config) for one in runs]
    keys = dict.fromkeys(key for values in flat for key in values)
    rows = []
    for key in keys:
        values: list[Any] = [one.get(key, MISSING) for one in flat]
        if any(value != values[0] for value in values[1:]) and not key.endswith("_dir"):
            rows.append((key, ["-" if one == MISSING else show(one) for one in values]))
    return rows


def environment(contents: Contents) -> dict[str, str]:
    """Return versions, commit and devices, as checkpoints and configuration have them."""
    code = contents.checkpoints[-1].state.get("code") if contents.checkpoints else None
    known = {str(name): str(value) for name, value in code.items()} if isinstance(code, dict) else {}
    settings = {key: contents.trainer.get(key) for key in ("device", "nnodes", "n_gpus_per_node", "seed")}
    return known | {f"trainer.{key}": str(value) for key, value in settings.items() if value is not None}

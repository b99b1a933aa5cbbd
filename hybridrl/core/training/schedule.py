"""The learning rate over a run, as a factor of its configured value: built-in schedules, or a custom function."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from hybridrl.config.custom_code import call_custom, load_function
from hybridrl.config.findings import ConfigError
from hybridrl.config.schema import OptimizerConfig
from hybridrl.core.algorithms.lookup import bind

TRIAL = 10  # made-up updates of a run, with which a custom schedule is tried
PAGE = "docs/extensions.md"


def schedule(update: int, total_updates: int, config: OptimizerConfig, updates_per_step: int = 1) -> float:
    """Return the learning-rate factor at an update, counted from 0: a linear warm-up, then the configured schedule."""
    # Warm-up is configured in steps of the trainer, as in verl, though the rate rises at every update.
    steps = config.lr_warmup_steps or 0.0
    warmup = round(steps * updates_per_step) if steps > 0 else int(config.lr_warmup_steps_ratio * total_updates)
    if update < warmup:
        return (update + 1) / warmup
    after, rest, least = update - warmup, max(total_updates - warmup, 1), config.min_lr_ratio or 0.0
    match config.lr_scheduler_type:
        case "constant":
            return 1.0
        case "inverse_sqrt":
            return max(math.sqrt(max(warmup, 1) / (update + 1)), least)
        case "linear":
            share = 1 - min(after / rest, 1.0)
        case "cosine":
            share = _wave(after / rest, config.num_cycles)
        case "wsd":
            stable = int(config.stable_ratio * rest)
            if after < stable:
                return 1.0
            share = _wave((after - stable) / max(rest - stable, 1), config.num_cycles)
        case custom:
            return _custom(custom, config)(after, rest)
    return least + (1 - least) * share


def _wave(done: float, cycles: float) -> float:
    """Return the cosine's value between 1 and 0 when this share of its periods is done."""
    return 0.5 * (1 + math.cos(2 * math.pi * cycles * min(done, 1.0)))


def _custom(name: str, config: OptimizerConfig, key: str = "optim.lr_scheduler_type") -> Callable[[int, int], Any]:
    return bind(_loaded(name, key), vars(config), rows=2)


@cache
def _loaded(name: str, key: str) -> Callable[..., Any]:
    return load_function(name, key)


def located(config: OptimizerConfig) -> OptimizerConfig:
    """Return the configuration with the absolute path of a custom schedule, which workers find from any directory."""
    name = config.lr_scheduler_type
    return replace(config, lr_scheduler_type=str(Path(name).expanduser().absolute())) if ":" in name else config


def try_schedule(key: str, config: OptimizerConfig) -> None:
    """Call a custom schedule with each update of a made-up run, and the one after; raises ConfigError if it fails, or
    returns what no update could use."""
    name = config.lr_scheduler_type
    if ":" not in name:
        return
    function = _custom(name, config, key)
    for update in range(TRIAL + 1):
        factor = call_custom(key, name, function, update, TRIAL, trial=f"at update {update} of {TRIAL}", page=PAGE)
        number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if not number or not 0 <= factor < math.inf:
            cause = f"{key}={name}: at update {update} of {TRIAL} it returns {factor!r:.60}"
            raise ConfigError(cause, fix="return the factor of the learning rate, a number of at least 0", keys=key)

"""From the name of an estimator or a policy loss to its catalog entry and its function.

A name is one of the catalog's, or path/to/file.py:function: a custom function, whose attributes are the facts of its
entry. Functions are imported here, when they are looked up.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from importlib import import_module
from inspect import Parameter, signature
from types import SimpleNamespace
from typing import Any, get_args

from hybridrl.config import catalog
from hybridrl.config.catalog import ESTIMATORS, POLICY_LOSSES, Estimator, PolicyLoss
from hybridrl.config.custom_code import bind_named, load_function
from hybridrl.config.findings import ConfigError
from hybridrl.config.values import Aggregation

# What a custom function finds in the namespace `settings` besides the configuration keys: name there, and key.
SETTINGS = {
    "normalise": "norm_adv_by_std_in_grpo",
    "part_weights": "gdpo_reward_weights",
    "clip_low": "clip_ratio_low",
    "clip_high": "clip_ratio_high",
    "clip_dual": "clip_ratio_c",
    "tau_positive": "tau_pos",
    "tau_negative": "tau_neg",
    "clip_cov_share": "clip_cov_ratio",
    "clip_cov_least": "clip_cov_lb",
    "clip_cov_most": "clip_cov_ub",
    "kl_cov_share": "kl_cov_ratio",
    "kl_cov_weight": "ppo_kl_coef",
    "dro_weight": "dro_beta",
}


@cache
def find_estimator(name: str) -> tuple[Estimator, Callable[..., Any]]:
    """The entry and the function of an advantage estimator; ConfigError if there is none."""
    key = "algorithm.adv_estimator"
    entry, function = _find(name, key, ESTIMATORS, Estimator)
    for item in entry.reads:
        _check(item, get_args(catalog.Field), f"{key}={name}: its attribute reads")
    return entry, function


@cache
def find_policy_loss(name: str) -> tuple[PolicyLoss, Callable[..., Any]]:
    """The entry and the function of a policy loss; ConfigError if there is none."""
    key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    entry, function = _find(name, key, POLICY_LOSSES, PolicyLoss)
    _check(entry.aggregation, (None, *get_args(Aggregation)), f"{key}={name}: its attribute aggregation")
    return entry, function


def _find(name: str, key: str, entries: Mapping[str, Any], kind: type) -> tuple[Any, Callable[..., Any]]:
    if name in entries:
        return entries[name], imported(entries[name].function)
    function = load_function(name, key)
    facts = {item.name: getattr(function, item.name) for item in fields(kind)[2:] if hasattr(function, item.name)}
    return kind(name, name, **facts), function


def imported(function: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function at "module:function"; a function is returned unchanged."""
    if callable(function):
        return function
    module, _, name = function.partition(":")
    return getattr(import_module(module), name)


def bind(function: Callable[..., Any], values: Mapping[str, Any], rows: int = 1) -> Callable[..., Any]:
    """The function with its parameters bound; its first `rows` arguments are left to the caller. A parameter is bound
    to the value of its name. Custom functions may have one further positional parameter, of any other name: it is bound
    to a namespace of all values."""
    parameters = list(signature(function).parameters.values())
    further = [item.name for item in parameters[rows:] if item.kind is Parameter.POSITIONAL_OR_KEYWORD]
    if further and further[0] not in values:
        present = {name: values[key] for name, key in SETTINGS.items() if key in values}
        values = {**values, further[0]: SimpleNamespace(**values, **present)}
    return bind_named(function, values)


def _check(value: Any, known: tuple[Any, ...], subject: str) -> None:
    if value not in known:
        names = ", ".join(name for name in known if name)
        raise ConfigError(f"{subject} names {value!r}", fix=f"choose from {names}")

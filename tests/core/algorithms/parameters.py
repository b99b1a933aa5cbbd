"""Estimators and policy losses by name, with parameters that a test does not set at their shipped values."""

from collections.abc import Callable
from typing import Any

from hybridrl.core.algorithms.algorithm import bind, find_estimator, find_policy_loss

ESTIMATOR_PARAMETERS = {"gamma": 1.0, "lam": 1.0, "norm_adv_by_std_in_grpo": True, "gdpo_reward_weights": ()}
LOSS_PARAMETERS = {
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.2,
    "clip_ratio_c": 3.0,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "clip_cov_ratio": 0.0002,
    "clip_cov_lb": 1.0,
    "clip_cov_ub": 5.0,
    "kl_cov_ratio": 0.0002,
    "ppo_kl_coef": 1.0,
    "dro_beta": 1.0,
}


def estimator(name: str, **parameters: Any) -> Callable[..., Any]:
    return bind(find_estimator(name)[1], ESTIMATOR_PARAMETERS | parameters)


def policy_loss(loss: str | Callable[..., Any], **parameters: Any) -> Callable[..., Any]:
    """A policy loss, or a token selector, by name or as a function."""
    function = find_policy_loss(loss)[1] if isinstance(loss, str) else loss
    return bind(function, LOSS_PARAMETERS | parameters, rows=2)

"""From what a model says of a pass's rows to that pass's share of the loss of its mini-batch, and of each metric."""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from hybridrl.algorithms.aggregation import Totals, token_weights
from hybridrl.algorithms.kl import kl_estimate
from hybridrl.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss
from hybridrl.algorithms.rollout_correction import RolloutCorrection
from hybridrl.algorithms.settings import LossSettings
from hybridrl.algorithms.value_loss import value_loss
from hybridrl.batch import Batch
from hybridrl.config.own_code import load_function
from hybridrl.training.model import TokenOutputs


@dataclass(frozen=True)
class LossConfig:
    """The loss of the policy, as plain values."""

    policy_loss: str  # a name, or path/to/file.py:function: functions of a user's file do not travel
    settings: LossSettings
    aggregation: str
    scale: float
    temperature: float
    grad_clip: float
    entropy_coeff: float = 0.0
    kl_coef: float = 0.0
    kl_form: str = "k3"
    correction: RolloutCorrection | None = None  # of the present log-probs against the rollout's, in bypass mode
    own_old_log_probs: bool = False  # the pass's own log-probs are the old ones: nothing has been updated since


@dataclass(frozen=True)
class ValueLossConfig:
    """The loss of the critic, as plain values."""

    clip: float
    aggregation: str
    scale: float
    grad_clip: float


@cache
def find_policy_loss(name: str) -> PolicyLoss:
    """The loss of this name, or the user's own; ConfigError where there is none."""
    key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    return POLICY_LOSSES[name] if name in POLICY_LOSSES else load_function(name, key)


def policy_loss(found: TokenOutputs, part: Batch, totals: Totals, loss: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy loss, less the entropy bonus, plus the KL to the reference."""
    if loss.own_old_log_probs:
        part = replace(part, old_log_probs=found.log_probs.detach())
    weights = token_weights(part, loss.aggregation, totals, loss.scale)
    per_token, statistics = find_policy_loss(loss.policy_loss)(found.log_probs, part, loss.settings)
    shares = {"pg_loss": (per_token * weights * _correction(found.log_probs, part, loss.correction)).sum()}
    total = shares["pg_loss"]
    if loss.entropy_coeff:
        shares["entropy_loss"] = (found.entropies * weights).sum()
        total = total - loss.entropy_coeff * shares["entropy_loss"]
    if loss.kl_coef:
        kl = found.reference_kl
        if kl is None:
            kl = kl_estimate(found.log_probs, part.reference_log_probs, loss.kl_form)
        shares["kl_loss"] = (kl * weights).sum()
        total = total + loss.kl_coef * shares["kl_loss"]
    return total, shares | _token_means(statistics, part, totals)


def critic_loss(values: Tensor, part: Batch, totals: Totals, loss: ValueLossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped value loss."""
    per_token, statistics = value_loss(values, part, loss.clip)
    total = (per_token * token_weights(part, loss.aggregation, totals, loss.scale)).sum()
    return total, {"vf_loss": total} | _token_means(statistics, part, totals)


def _correction(log_probs: Tensor, part: Batch, against_rollout: RolloutCorrection | None) -> Tensor | float:
    """The factor on each token's loss for the difference between trainer and rollout engine."""
    if against_rollout is None:
        return 1.0 if part.importance_weights is None else part.importance_weights
    log_ratio = log_probs.detach() - part.rollout_log_probs
    weights, kept = against_rollout.weights(log_ratio, part), against_rollout.kept(log_ratio, part)
    return kept.float() if weights is None else torch.where(kept, weights, 0.0)


def _token_means(statistics: dict[str, Tensor], part: Batch, totals: Totals) -> dict[str, Tensor]:
    """This pass's share of each statistic's mean over the tokens that the policy wrote."""
    share = part.response_mask / max(totals.tokens, 1)
    return {name: (value * share).sum() for name, value in statistics.items()}

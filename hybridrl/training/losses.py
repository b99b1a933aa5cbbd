"""From what a model says of a pass's rows to that pass's share of the loss of its mini-batch, and of each metric."""

from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from hybridrl.algorithms.aggregation import Totals, token_weights
from hybridrl.algorithms.kl import kl_estimate
from hybridrl.algorithms.policy_losses import AGGREGATIONS, BY_TOKEN, POLICY_LOSSES, PolicyLoss
from hybridrl.algorithms.rollout_correction import RolloutCorrection
from hybridrl.algorithms.settings import LossSettings
from hybridrl.algorithms.value_loss import value_loss
from hybridrl.batch import Batch
from hybridrl.config.custom_code import load_function
from hybridrl.training.token_outputs import Foresight, TokenOutputs


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
    kl_form: str | None = None  # of the KL to the reference; None: there is none
    # In bypass mode, of the present log-probs against the rollout's: its weights. Rejections come before (bypass.py).
    correction: RolloutCorrection | None = None
    own_old_log_probs: bool = False  # the pass's own log-probs are the old ones: nothing has been updated since
    tell_entropy: bool = False  # where no pass before the update did


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
    """Policy loss, less the entropy bonus, plus the KL to the reference; statistics of all three."""
    if loss.own_old_log_probs:
        part = replace(part, old_log_probs=found.log_probs.detach())
    aggregation = AGGREGATIONS.get(loss.policy_loss, loss.aggregation)
    policy_weights = token_weights(part, aggregation, totals, loss.scale)
    importance, written = _importance(found.log_probs, part, loss.correction), part.response_mask
    log_probs = torch.where(written, found.log_probs, 0.0)
    per_token, statistics = find_policy_loss(loss.policy_loss)(log_probs, _only_written(part), loss.settings)
    shares = {"pg_loss": (torch.where(written, per_token, 0.0) * importance * policy_weights).sum()}
    total = shares["pg_loss"]
    weights = token_weights(part, loss.aggregation, totals, loss.scale)
    if loss.entropy_coeff:
        shares["entropy_loss"] = (found.entropies * weights).sum()
        total = total - loss.entropy_coeff * shares["entropy_loss"]
    if loss.kl_form is not None:
        shares["kl_loss"] = (_kl(found, part, loss.kl_form) * weights).sum()
        total = total + loss.kl_coef * shares["kl_loss"]
    if loss.tell_entropy:
        statistics["entropy"] = found.entropies.detach()
    return total, shares | _token_means(statistics, part, totals)


def foresight(part: Batch, totals: Totals, loss: LossConfig) -> Foresight | None:
    """The gradient of `policy_loss` by what the model says, as soon as it does; None where a token's may depend on what
    it says of others."""
    by_token = loss.policy_loss in BY_TOKEN and (loss.correction is None or loss.correction.by_token)
    return partial(_gradient, part=part, totals=totals, loss=loss) if by_token else None


def _gradient(found: TokenOutputs, part: Batch, totals: Totals, loss: LossConfig) -> TokenOutputs:
    with torch.enable_grad():
        said = [None if value is None else value.detach().requires_grad_() for value in found]
        total, _ = policy_loss(TokenOutputs(*said), part, totals, loss)
    present = [value for value in said if value is not None]
    gradients = iter(torch.autograd.grad(total, present, allow_unused=True, materialize_grads=True))
    return TokenOutputs(*(None if value is None else next(gradients) for value in said))


def critic_loss(values: Tensor, part: Batch, totals: Totals, loss: ValueLossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped value loss."""
    per_token, statistics = value_loss(values, part, loss.clip)
    total = (per_token * token_weights(part, loss.aggregation, totals, loss.scale)).sum()
    return total, {"vf_loss": total} | _token_means(statistics, part, totals)


def _importance(log_probs: Tensor, part: Batch, against_rollout: RolloutCorrection | None) -> Tensor | float:
    """The factor on each token's loss for the difference to the rollout engine."""
    weights = part.importance_weights
    if against_rollout is not None:
        weights = against_rollout.weights(log_probs.detach() - part.rollout_log_probs, part)
    return 1.0 if weights is None else weights


def _only_written(part: Batch) -> Batch:
    """The rows as a policy loss may read them: no number elsewhere can spoil the sums, nor their gradient, by a NaN."""
    written, old, advantages = part.response_mask, part.old_log_probs, part.advantages
    return replace(
        part,
        old_log_probs=None if old is None else torch.where(written, old, 0.0),
        advantages=None if advantages is None else torch.where(written, advantages, 0.0),
    )


def _kl(found: TokenOutputs, part: Batch, form: str) -> Tensor:
    """KL to the reference a token; 0 on tokens that the policy did not write."""
    written = part.response_mask
    if form == "full":
        return torch.where(written, found.reference_kl, 0.0)
    log_probs, reference = (torch.where(written, v, 0.0) for v in (found.log_probs, part.reference_log_probs))
    return torch.where(written, kl_estimate(log_probs, reference, form), 0.0)


def _token_means(statistics: dict[str, Tensor], part: Batch, totals: Totals) -> dict[str, Tensor]:
    """This pass's share of each statistic's mean over the tokens that the policy wrote."""
    written = part.response_mask
    return {name: torch.where(written, value, 0.0).sum() / max(totals.tokens, 1) for name, value in statistics.items()}

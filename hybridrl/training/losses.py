"""From a model's outputs for a micro-batch to its share of the mini-batch's loss and of each metric."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridrl.algorithms.lookup import bind, find_policy_loss
from hybridrl.algorithms.objective import Totals, kl_estimate, token_weights, value_loss
from hybridrl.algorithms.rollout_correction import RolloutCorrection
from hybridrl.batch import Batch
from hybridrl.training.token_outputs import LossGradient, TokenOutputs


@dataclass(frozen=True)
class LossConfig:
    """The loss of the policy, as plain values."""

    policy_loss: str  # a name, or path/to/file.py:function: custom functions cannot be pickled
    aggregation: str
    scale: float
    temperature: float
    grad_clip: float
    parameters: dict[str, Any] = field(default_factory=dict)  # by configuration key; a policy loss takes those it names
    entropy_coeff: float = 0.0
    kl_coef: float = 0.0
    kl_form: str | None = None  # of the KL to the reference; None: there is none
    # In bypass mode, weights of the current log-probs against the rollout's. Rejections come before (bypass.py).
    correction: RolloutCorrection | None = None
    own_old_log_probs: bool = False  # the micro-batch's own log-probs are the old ones: nothing has been updated since
    log_entropy: bool = False  # if no forward pass before the update computed it


@dataclass(frozen=True)
class ValueLossConfig:
    """The loss of the critic, as plain values."""

    clip: float
    aggregation: str
    scale: float
    grad_clip: float


def policy_loss(
    outputs: TokenOutputs, part: Batch, totals: Totals, loss: LossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy loss, less the entropy bonus, plus the KL to the reference; statistics of all three."""
    if loss.own_old_log_probs:
        part = replace(part, old_log_probs=outputs.log_probs.detach())
    entry, function = find_policy_loss(loss.policy_loss)
    policy_weights = token_weights(part, entry.aggregation or loss.aggregation, totals, loss.scale)
    importance, written = _importance(outputs.log_probs, part, loss.correction), part.response_mask
    log_probs = torch.where(written, outputs.log_probs, 0.0)
    per_token, statistics = bind(function, loss.parameters, rows=2)(log_probs, _only_written(part))
    shares = {"pg_loss": (torch.where(written, per_token, 0.0) * importance * policy_weights).sum()}
    total = shares["pg_loss"]
    weights = token_weights(part, loss.aggregation, totals, loss.scale)
    if loss.entropy_coeff:
        shares["entropy_loss"] = (outputs.entropies * weights).sum()
        total = total - loss.entropy_coeff * shares["entropy_loss"]
    if loss.kl_form is not None:
        shares["kl_loss"] = (_kl(outputs, part, loss.kl_form) * weights).sum()
        total = total + loss.kl_coef * shares["kl_loss"]
    if loss.log_entropy:
        statistics["entropy"] = outputs.entropies.detach()
    return total, shares | _token_means(statistics, part, totals)


def gradient_function(part: Batch, totals: Totals, loss: LossConfig) -> LossGradient | None:
    """The gradient of `policy_loss` by a model's outputs as a function of them, so that it is computed as soon as they
    are; None if the loss of a token may depend on the outputs of others."""
    by_token = find_policy_loss(loss.policy_loss)[0].by_token and (loss.correction is None or loss.correction.by_token)
    return partial(_gradient, part=part, totals=totals, loss=loss) if by_token else None


def _gradient(outputs: TokenOutputs, part: Batch, totals: Totals, loss: LossConfig) -> TokenOutputs:
    with torch.enable_grad():
        leaves = [None if value is None else value.detach().requires_grad_() for value in outputs]
        total, _ = policy_loss(TokenOutputs(*leaves), part, totals, loss)
    present = [value for value in leaves if value is not None]
    gradients = iter(torch.autograd.grad(total, present, allow_unused=True, materialize_grads=True))
    return TokenOutputs(*(None if value is None else next(gradients) for value in leaves))


def critic_loss(values: Tensor, part: Batch, totals: Totals, loss: ValueLossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped value loss."""
    per_token, statistics = value_loss(values, part, loss.clip)
    total = (per_token * token_weights(part, loss.aggregation, totals, loss.scale)).sum()
    return total, {"vf_loss": total} | _token_means(statistics, part, totals)


def _importance(log_probs: Tensor, part: Batch, correction: RolloutCorrection | None) -> Tensor | float:
    """The factor on each token's loss for the difference to the rollout engine."""
    weights = part.importance_weights
    if correction is not None:
        weights = correction.weights(log_probs.detach() - part.rollout_log_probs, part)
    return 1.0 if weights is None else weights


def _only_written(part: Batch) -> Batch:
    """The rows as a policy loss may read them: a NaN on any other token cannot reach the sums or their gradient."""
    written, old, advantages = part.response_mask, part.old_log_probs, part.advantages
    return replace(
        part,
        old_log_probs=None if old is None else torch.where(written, old, 0.0),
        advantages=None if advantages is None else torch.where(written, advantages, 0.0),
    )


def _kl(outputs: TokenOutputs, part: Batch, form: str) -> Tensor:
    """KL to the reference per token; 0 on tokens that the policy did not write."""
    written = part.response_mask
    if form == "full":
        return torch.where(written, outputs.reference_kl, 0.0)
    log_probs, reference = (torch.where(written, v, 0.0) for v in (outputs.log_probs, part.reference_log_probs))
    return torch.where(written, kl_estimate(log_probs, reference, form), 0.0)


def _token_means(statistics: dict[str, Tensor], part: Batch, totals: Totals) -> dict[str, Tensor]:
    """This micro-batch's share of each statistic's mean over the tokens that the policy wrote."""
    written = part.response_mask
    return {name: torch.where(written, value, 0.0).sum() / max(totals.tokens, 1) for name, value in statistics.items()}

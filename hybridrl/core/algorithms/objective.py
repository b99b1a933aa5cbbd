"""The parts of an objective that every policy loss shares: each token's weight in it, KL penalties, the critic's loss.

The loss of a micro-batch is the sum of weighted token losses. Divisors are counted over the whole mini-batch, so that
micro-batches and ranks add up to the same loss however a mini-batch is cut.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridrl.core.batch import Batch
from hybridrl.required import required

FORMS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


@dataclass(frozen=True)
class Divisors:
    """Counts of a mini-batch over all ranks: tokens that are trained, and rows with at least one of them; an episode of
    several rows counts as one. `masked` has those of the tokens that a loss term's mask leaves, by the mask's name."""

    tokens: int
    rows: int
    masked: Mapping[str, "Divisors"] = field(default_factory=dict)

    @staticmethod
    def of(batch: Batch, masks: Iterable[str] = ()) -> "Divisors":
        written = batch.per_row(required(batch.response_mask).long())
        rows = (written > 0).nonzero() if batch.episode is None else batch.episode[written > 0].unique()
        return Divisors(int(written.sum()), len(rows), {mask: Divisors.of(batch.masked(mask)) for mask in masks})


def token_weights(batch: Batch, mode: str, totals: Divisors, scale: float = 1.0) -> Tensor:
    """The weight of each response token in the loss [response tokens]; 0 if it is not trained, such as a tool's.

    token-mean: every token of the mini-batch counts the same (DAPO, Yu et al. 2025)
    token-sum: every token counts 1
    seq-mean-token-sum: a row counts by the sum of its tokens
    seq-mean-token-mean: every row counts the same (GRPO's paper)
    seq-mean-token-sum-norm: a row counts by the sum of its tokens over a constant `scale` (Dr. GRPO, Liu et al. 2025)

    These are verl's (August 2026), with two exceptions: rows without written tokens do not count in any mean, and the
    rows of an episode count together as one.
    """
    mask = required(batch.response_mask).float()
    rows = max(totals.rows, 1)
    match mode:
        case "token-mean":
            return mask / max(totals.tokens, 1)
        case "token-sum":
            return mask
        case "seq-mean-token-sum":
            return mask / rows
        case "seq-mean-token-mean":
            tokens = batch.per_row(mask) if batch.episode_tokens is None else batch.episode_tokens
            return mask / (rows * tokens.clamp(min=1)[batch.response_row])
        case _:
            return mask / (rows * scale)


def value_loss(values: Tensor, batch: Batch, clip: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The critic's loss per token: PPO's clipped value loss (as in Schulman et al.'s code, 2017); statistics per token.
    0.5 max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2): R are the batch's `returns`, v_old its `values`."""
    old, returns = required(batch.values), required(batch.returns)
    near = values.clamp(old - clip, old + clip)
    free, clipped = (values - returns).square(), (near - returns).square()
    loss = 0.5 * torch.maximum(free, clipped)
    return loss, {"vf_clipfrac": (clipped > free).float(), "vpred_mean": values.detach()}


def kl_estimate(log_probs: Tensor, reference: Tensor, form: str) -> Tensor:
    """KL(policy || reference) per token, from the log-probs of sampled tokens.

    One of Schulman's estimators (Approximating KL divergence, 2020); FORMS has its names and verl's.

    With d = reference - log_probs: k1 = -d is unbiased, k2 = d^2/2 has little variance, k3 = exp(d) - d - 1 has both
    properties and is clamped to [-10, 10] as in verl. Where k3 is clamped it has no gradient; elsewhere its expected
    gradient is the one of KL(reference || policy). A trailing "+" keeps the value and takes k2's gradient, whose
    expectation is the gradient of the KL.
    """
    if form.endswith("+"):
        value, through = kl_estimate(log_probs, reference, form[:-1]), kl_estimate(log_probs, reference, "k2")
        return value.detach() + (through - through.detach())
    difference = reference - log_probs
    match FORMS[form]:
        case "k1":
            return -difference
        case "abs":
            return difference.abs()
        case "k2":
            return 0.5 * difference.square()
        case _:
            difference = difference.clamp(-20, 20)
            return (difference.exp() - difference - 1).clamp(-10, 10)


class KLWeight:
    """The weight of a KL penalty in the reward: fixed, or adapted to a target (Ziegler et al. 2019, section 2.2)."""

    def __init__(self, weight: float, target: float | None = None, horizon: int = 10000) -> None:
        self.value, self.target, self.horizon = weight, target, horizon

    def update(self, kl: float, samples: int) -> None:
        """Adapt to the mean KL measured over a step's samples; a value that is not finite is ignored."""
        if self.target is not None and math.isfinite(kl):
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.value *= 1 + error * samples / self.horizon


def penalized(batch: Batch, form: str, weight: float) -> tuple[Tensor, float]:
    """Token rewards less the weighted KL of each token, and the KL as verl logs it: the mean of the rows' means. `form`
    is one of `kl_estimate`'s, or "full": the sum over the vocabulary, which the model computed."""
    if form == "full":
        kl = required(batch.reference_kl)
    else:
        kl = kl_estimate(required(batch.old_log_probs), required(batch.reference_log_probs), form)
    kl = torch.where(required(batch.response_mask), kl, 0.0)
    return required(batch.token_rewards) - weight * kl, float(batch.trained_mean(kl).mean())

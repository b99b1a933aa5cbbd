"""KL(policy || reference) per token, estimated from the log-probs of sampled tokens, and the weight of a penalty.

The `full` KL is a sum over the vocabulary: the model computes it and fills the batch's `reference_kl`.
"""

import math

import torch
from torch import Tensor

from hybridrl.batch import Batch

FORMS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def kl_estimate(log_probs: Tensor, reference: Tensor, form: str) -> Tensor:
    """One of Schulman's estimators (Approximating KL divergence, 2020) per token; FORMS has its names and verl's.

    k1 is unbiased, k2 = d^2/2 has little variance, k3 = exp(d) - d - 1 has both and is clamped to [-10, 10] as in verl,
    where d = reference - log_probs. If clamped it has no gradient, else in expectation that of KL(reference || policy).
    A trailing "+" keeps the value and takes k2's gradient, whose expectation is the gradient of the KL.
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
    """Token rewards less the weighted KL of each token, and the KL as verl logs it: the mean of the rows' means.

    `form` is one of `kl_estimate`'s, or "full".
    """
    full = form == "full"
    kl = batch.reference_kl if full else kl_estimate(batch.old_log_probs, batch.reference_log_probs, form)
    kl = torch.where(batch.response_mask, kl, 0.0)
    return batch.token_rewards - weight * kl, float(batch.written_mean(kl).mean())

"""Policy losses, one value a token. An own one is any function of the same form, named path/to/file.py:function."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.batch import Batch


@dataclass(frozen=True)
class Clip:
    """The window of the probability ratio, [1 - low, 1 + high], and the bound of the dual clip."""

    low: float
    high: float
    dual: float


# (log-probs, the rows they belong to, clip) -> loss a token, and statistics a token to be averaged.
PolicyLoss = Callable[[Tensor, Batch, Clip], tuple[Tensor, dict[str, Tensor]]]


def vanilla(log_probs: Tensor, batch: Batch, clip: Clip) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped loss (Schulman et al. 2017) with the dual clip for negative advantages (Ye et al. 2020)."""
    advantages = batch.advantages
    log_ratio = (log_probs - batch.old_log_probs).clamp(-20, 20)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip.low, 1 + clip.high)
    pessimistic = torch.maximum(unclipped, clipped)
    bound = -advantages * clip.dual
    bounded = (advantages < 0) & (pessimistic > bound)
    loss = torch.where(bounded, bound, pessimistic)
    return loss, {
        "pg_clipfrac": (clipped > unclipped).float(),
        "pg_clipfrac_lower": bounded.float(),
        "ppo_kl": -log_ratio.detach(),
    }


def likelihood(log_probs: Tensor, batch: Batch, clip: Clip) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood: supervised fine-tuning as the simplest policy loss."""
    return -log_probs, {}


POLICY_LOSSES: dict[str, PolicyLoss] = {"vanilla": vanilla, "likelihood": likelihood}

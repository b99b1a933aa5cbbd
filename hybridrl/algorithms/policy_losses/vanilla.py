"""PPO's clipped loss."""

import torch
from torch import Tensor

from hybridrl.algorithms.policy_losses.ratio import clipped_loss, log_ratio
from hybridrl.algorithms.settings import LossSettings
from hybridrl.batch import Batch


def vanilla(log_probs: Tensor, batch: Batch, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped loss (Schulman et al. 2017) with the dual clip for negative advantages (Ye et al. 2020).

    max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), at most -A clip_dual where A < 0.
    """
    change = log_ratio(log_probs, batch)
    pessimistic, clipped = clipped_loss(change.exp(), batch, settings)
    bound = -batch.advantages * settings.clip_dual
    bounded = (batch.advantages < 0) & (pessimistic > bound)
    return torch.where(bounded, bound, pessimistic), {
        "pg_clipfrac": clipped.float(),
        "pg_clipfrac_lower": bounded.float(),
        "ppo_kl": -change.detach(),
    }

"""GMPO: the geometric mean of a row's token ratios."""

import torch
from torch import Tensor

from hybridrl.algorithms.settings import LossSettings
from hybridrl.batch import Batch


def geo_mean(log_probs: Tensor, batch: Batch, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Geometric-Mean Policy Optimization (Zhao et al. 2025): -A exp(mean of the row's clipped log ratios).

    A log ratio is clipped at clip_high where A > 0 and at -clip_low where A < 0 (the window is one of logarithms; the
    paper's is 0.4 on both sides), and counts as 0 where A = 0. A is the mean of the row's advantages: the formula is
    the paper's where a row has one. Every token carries its row's loss, so averaged over tokens, then rows, it is the
    mean over rows. As in verl `pg_clipfrac` is what left the window, on either side, where A > 0, `pg_clipfrac_lower`
    where A < 0.

    Where it differs from verl: importance weights multiply token by token, so that a row counts by their mean, not by
    their geometric mean; and a row of which the policy wrote nothing does not count as a row.
    """
    change = log_probs - batch.old_log_probs
    low, high, advantages = -settings.clip_low, settings.clip_high, batch.advantages
    clipped = torch.where(advantages > 0, change.clamp(max=high), change.clamp(min=low))
    ratio = batch.written_mean(clipped * (advantages != 0)).exp()
    loss = -batch.written_mean(advantages) * ratio
    change = change.detach()
    outside = (change < low) | (change > high)
    return loss[batch.response_row], {
        "pg_clipfrac": (outside & (advantages > 0)).float(),
        "pg_clipfrac_lower": (outside & (advantages < 0)).float(),
        "ppo_kl": -change,
    }

"""Divergence PPO (Qi et al. 2026): a trust region of probabilities rather than of their ratio."""

import torch
from torch import Tensor

from hybridrl.algorithms.policy_losses.ratio_clipping import log_ratio
from hybridrl.batch import Batch

TINY = 1e-8


def dppo_tv(
    log_probs: Tensor, batch: Batch, *, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Divergence PPO with the binary total variation |p - p_old|.

    A token whose probability moved along its advantage by more than `clip_ratio_high` (A > 0) or `clip_ratio_low` is
    masked. The others have the loss -A min(r, clip_ratio_c) log p, the ratio constant; `clip_ratio_c` is meant to be
    large (verl's default of 3 is small).
    """
    change = log_probs.detach().exp() - batch.old_log_probs.exp()
    kept = torch.where(batch.advantages > 0, change <= clip_ratio_high, change >= -clip_ratio_low)
    return _masked_loss(log_probs, batch, clip_ratio_c, kept)


def dppo_kl(
    log_probs: Tensor, batch: Batch, *, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """`dppo_tv` with the binary divergence KL(p_old || p) of the token against all others together."""
    log_new, log_old = log_probs.detach(), batch.old_log_probs
    new, old = log_new.exp(), log_old.exp()
    # Rounding may lift a probability above 1.
    others_old, others_new = (1 - old).clamp(min=0), (1 - new).clamp(min=0)
    divergence = old * (log_old - log_new) + others_old * ((others_old + TINY) / (others_new + TINY)).log()
    rises_within = (divergence <= clip_ratio_high) | (new <= old)
    falls_within = (divergence <= clip_ratio_low) | (new >= old)
    return _masked_loss(log_probs, batch, clip_ratio_c, torch.where(batch.advantages > 0, rises_within, falls_within))


def _masked_loss(
    log_probs: Tensor, batch: Batch, clip_ratio_c: float, kept: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    change = log_ratio(log_probs.detach(), batch)
    ratio = change.exp()
    loss = -batch.advantages * ratio.clamp(max=clip_ratio_c) * log_probs * kept
    return loss, {
        "pg_clipfrac": (~kept).float(),
        "pg_clipfrac_lower": (kept & (ratio > clip_ratio_c)).float(),
        "ppo_kl": -change,
    }

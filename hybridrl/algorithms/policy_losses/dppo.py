"""DPPO: a trust region in probabilities, not in their ratio."""

import torch
from torch import Tensor

from hybridrl.algorithms.policy_losses.ratio import log_ratio
from hybridrl.algorithms.settings import LossSettings
from hybridrl.batch import Batch

TINY = 1e-8


def dppo_tv(log_probs: Tensor, batch: Batch, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Divergence PPO (Qi et al. 2026) with the binary total variation |p - p_old|.

    A token whose probability moved along its advantage by more than `clip_high` (A > 0) or `clip_low` is masked. The
    others have the loss -A min(r, clip_dual) log p, the ratio constant; their bound is meant to be far (verl's default
    of 3 is near).
    """
    change = log_probs.detach().exp() - batch.old_log_probs.exp()
    kept = torch.where(batch.advantages > 0, change <= settings.clip_high, change >= -settings.clip_low)
    return _masked_loss(log_probs, batch, settings, kept)


def dppo_kl(log_probs: Tensor, batch: Batch, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """As `dppo_tv`, with the binary divergence KL(p_old || p) of the token against all others together."""
    log_new, log_old = log_probs.detach(), batch.old_log_probs
    new, old = log_new.exp(), log_old.exp()
    # Rounding may lift a probability above 1.
    others_old, others_new = (1 - old).clamp(min=0), (1 - new).clamp(min=0)
    divergence = old * (log_old - log_new) + others_old * ((others_old + TINY) / (others_new + TINY)).log()
    rises_within = (divergence <= settings.clip_high) | (new <= old)
    falls_within = (divergence <= settings.clip_low) | (new >= old)
    return _masked_loss(log_probs, batch, settings, torch.where(batch.advantages > 0, rises_within, falls_within))


def _masked_loss(
    log_probs: Tensor, batch: Batch, settings: LossSettings, kept: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    change = log_ratio(log_probs.detach(), batch)
    ratio = change.exp()
    loss = -batch.advantages * ratio.clamp(max=settings.clip_dual) * log_probs * kept
    return loss, {
        "pg_clipfrac": (~kept).float(),
        "pg_clipfrac_lower": (kept & (ratio > settings.clip_dual)).float(),
        "ppo_kl": -change,
    }

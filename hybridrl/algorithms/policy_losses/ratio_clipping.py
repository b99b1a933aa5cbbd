"""Losses of the ratio of the policy's probability to the old one, with a window around 1 or a smooth gate."""

import torch
from torch import Tensor

from hybridrl.batch import Batch


def log_ratio(log_probs: Tensor, batch: Batch) -> Tensor:
    """Logarithm of the ratio per token, clamped to [-20, 20] so that the ratio stays finite."""
    return (log_probs - batch.old_log_probs).clamp(-20, 20)


def clipped_loss(ratio: Tensor, batch: Batch, clip_ratio_low: float, clip_ratio_high: float) -> tuple[Tensor, Tensor]:
    """The larger of the losses with the ratio unchanged and clipped to its window; where clipping made it larger."""
    unclipped = -batch.advantages * ratio
    clipped = -batch.advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def vanilla(
    log_probs: Tensor, batch: Batch, *, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped loss (Schulman et al. 2017) with the dual clip for negative advantages (Ye et al. 2020).

    max(-A r, -A clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high)), at most -A clip_ratio_c if A < 0.
    """
    change = log_ratio(log_probs, batch)
    pessimistic, clipped = clipped_loss(change.exp(), batch, clip_ratio_low, clip_ratio_high)
    bound = -batch.advantages * clip_ratio_c
    bounded = (batch.advantages < 0) & (pessimistic > bound)
    return torch.where(bounded, bound, pessimistic), {
        "pg_clipfrac": clipped.float(),
        "pg_clipfrac_lower": bounded.float(),
        "ppo_kl": -change.detach(),
    }


def gspo(
    log_probs: Tensor, batch: Batch, *, clip_ratio_low: float, clip_ratio_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Group Sequence Policy Optimization (Zheng et al. 2025) in its token form, GSPO-token, as in verl.

    PPO's clipped loss of the row's ratio s = exp(mean log ratio of its written tokens): each token has the value of s
    and passes the gradient through its own log-prob only. With one advantage per row, the mean over a row's tokens is
    GSPO's sequence loss, in value and in gradient. log s is at most 10.
    """
    change = log_probs - batch.old_log_probs
    sequence = batch.written_mean(change.detach())[batch.response_row]
    ratio = (sequence + log_probs - log_probs.detach()).clamp(max=10).exp()
    loss, clipped = clipped_loss(ratio, batch, clip_ratio_low, clip_ratio_high)
    return loss, {"pg_clipfrac": clipped.float(), "ppo_kl": -change.detach()}


def geo_mean(
    log_probs: Tensor, batch: Batch, *, clip_ratio_low: float, clip_ratio_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Geometric-Mean Policy Optimization (GMPO, Zhao et al. 2025): -A exp(mean of the row's clipped log ratios).

    A log ratio is clipped at clip_ratio_high if A > 0 and at -clip_ratio_low if A < 0 (the window is one of logarithms;
    the paper's is 0.4 on both sides), and counts as 0 if A = 0. A is the mean of the row's advantages: the formula is
    the paper's if a row has one. Every token has its row's loss, so averaged over tokens, then rows, it is the mean
    over rows. As in verl `pg_clipfrac` is the share outside the window, on either side, if A > 0, `pg_clipfrac_lower`
    if A < 0.

    It differs from verl in two ways: importance weights multiply per token, so that a row counts by their mean, not by
    their geometric mean; and a row in which the policy wrote nothing does not count as a row.
    """
    change = log_probs - batch.old_log_probs
    low, high, advantages = -clip_ratio_low, clip_ratio_high, batch.advantages
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


def cispo(
    log_probs: Tensor, batch: Batch, *, clip_ratio_low: float, clip_ratio_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """CISPO (MiniMax-M1, 2025): -A clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high) log p, the clipped ratio constant.

    Every token keeps its gradient. The paper leaves the lower side open; verl clips on both sides, and so does this.
    `clip_ratio_low=1` is the paper's.
    """
    change = log_ratio(log_probs.detach(), batch)
    ratio = change.exp()
    weight = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    return -batch.advantages * weight * log_probs, {"pg_clipfrac": (weight != ratio).float(), "ppo_kl": -change}


def sapo(log_probs: Tensor, batch: Batch, *, tau_pos: float, tau_neg: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Soft Adaptive Policy Optimization (Gao et al. 2025): -A (4 / tau) sigmoid(tau (r - 1)).

    tau is `tau_pos` if A > 0, else `tau_neg`; the higher, the sooner the gradient fades away from r = 1.
    """
    change = log_ratio(log_probs, batch)
    tau = torch.full_like(change, tau_neg).masked_fill(batch.advantages > 0, tau_pos)
    gate = 4 / tau * torch.sigmoid(tau * (change.exp() - 1))
    return -batch.advantages * gate, {"ppo_kl": -change.detach()}

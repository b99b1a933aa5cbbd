"""Clip-Cov and KL-Cov (Cui et al. 2025): separate treatment for the tokens that lower the entropy most.

A token lowers the entropy by what it adds to the covariance of log-prob and advantage. The tokens are selected once per
mini-batch, before its first gradient: verl selects in each micro-batch, from the current log-probs (and Clip-Cov among
tokens that PPO has not clipped), but the gradient must not depend on how a mini-batch is cut.
"""

import torch
from torch import Tensor

from hybridrl.algorithms.policy_losses.ratio_clipping import clipped_loss
from hybridrl.batch import Batch


def clip_cov(
    log_probs: Tensor, batch: Batch, *, clip_ratio_low: float, clip_ratio_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clip-Cov: PPO's clipped loss, without a dual clip, and 0 for the selected tokens.

    As in verl `pg_clipfrac` is the share of the selected tokens.
    """
    change = log_probs - batch.old_log_probs
    loss, _ = clipped_loss(change.exp(), batch, clip_ratio_low, clip_ratio_high)
    return torch.where(batch.chosen, 0.0, loss), {"pg_clipfrac": batch.chosen.float(), "ppo_kl": -change.detach()}


def kl_cov(log_probs: Tensor, batch: Batch, *, ppo_kl_coef: float) -> tuple[Tensor, dict[str, Tensor]]:
    """KL-Cov: -A r, plus `ppo_kl_coef` |log r| for the selected tokens. Nothing is clipped.

    As in verl `ppo_kl` is |log r|.
    """
    change = log_probs - batch.old_log_probs
    penalty = ppo_kl_coef * change.abs()
    loss = -batch.advantages * change.exp() + torch.where(batch.chosen, penalty, 0.0)
    return loss, {"ppo_kl": change.detach().abs()}


def select_clipped(
    batch: Batch, generator: torch.Generator, *, clip_cov_ratio: float, clip_cov_lb: float, clip_cov_ub: float
) -> Tensor:
    """Sample the share `clip_cov_ratio` of a mini-batch's written tokens from those with a covariance in the bounds."""
    covariances = covariance(batch)
    candidates = ((covariances > clip_cov_lb) & (covariances < clip_cov_ub)).nonzero().squeeze(1)
    drawn = torch.randperm(len(candidates), generator=generator)[: share_of_written(batch, clip_cov_ratio)]
    return torch.zeros_like(batch.response_mask).index_fill_(0, candidates[drawn], True)


def select_penalized(batch: Batch, generator: torch.Generator, *, kl_cov_ratio: float) -> Tensor:
    """The share `kl_cov_ratio` of a mini-batch's written tokens that have the highest covariance."""
    top = covariance(batch).topk(share_of_written(batch, kl_cov_ratio)).indices
    return torch.zeros_like(batch.response_mask).index_fill_(0, top, True)


def covariance(batch: Batch) -> Tensor:
    """(A - mean A)(log p - mean log p) per token, means over all written tokens; -inf where the policy did not write.

    The log-probs are those before the step's updates.
    """
    written = batch.response_mask
    product = _centred(batch.advantages, written) * _centred(batch.old_log_probs, written)
    return torch.where(written, product, -torch.inf)


def share_of_written(batch: Batch, share: float) -> int:
    """Number of tokens in a share of the written ones: rounded down, but at least one if any are written."""
    written = int(batch.response_mask.sum())
    return min(max(int(share * written), 1), written)


def _centred(values: Tensor, written: Tensor) -> Tensor:
    return values - values[written].mean()

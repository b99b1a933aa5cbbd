"""Clip-Cov: some of the tokens that drive entropy down have no gradient."""

import torch
from torch import Tensor

from hybridrl.algorithms.policy_losses.covariance import covariance, share_of_written
from hybridrl.algorithms.policy_losses.ratio import clipped_loss
from hybridrl.algorithms.settings import LossSettings
from hybridrl.batch import Batch


def clip_cov(log_probs: Tensor, batch: Batch, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Clip-Cov (Cui et al. 2025): PPO's clipped loss, without a dual clip, and 0 for the tokens chosen.

    As in verl `pg_clipfrac` is the share of the chosen.
    """
    change = log_probs - batch.old_log_probs
    loss, _ = clipped_loss(change.exp(), batch, settings)
    return torch.where(batch.chosen, 0.0, loss), {"pg_clipfrac": batch.chosen.float(), "ppo_kl": -change.detach()}


def choose_clipped(batch: Batch, settings: LossSettings, generator: torch.Generator) -> Tensor:
    """Draw `clip_cov_share` of the written tokens of a mini-batch from those with a covariance within the bounds.

    Where verl draws anew in each micro-batch, from the log-probs of the moment and among tokens that PPO has not
    clipped, this is done once, at the step's start, where nothing is clipped yet: the gradient must not depend on how
    a mini-batch is cut.
    """
    found = covariance(batch)
    candidates = ((found > settings.clip_cov_least) & (found < settings.clip_cov_most)).nonzero().squeeze(1)
    drawn = torch.randperm(len(candidates), generator=generator)[: share_of_written(batch, settings.clip_cov_share)]
    return torch.zeros_like(batch.response_mask).index_fill_(0, candidates[drawn], True)

"""KL-Cov: the tokens that drive entropy down most pay for moving."""

import torch
from torch import Tensor

from hybridrl.algorithms.policy_losses.covariance import covariance, share_of_written
from hybridrl.algorithms.settings import LossSettings
from hybridrl.batch import Batch


def kl_cov(log_probs: Tensor, batch: Batch, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """KL-Cov (Cui et al. 2025): -A r, and `kl_cov_weight` |log r| more for the tokens chosen. Nothing is clipped.

    As in verl `ppo_kl` is |log r|.
    """
    change = log_probs - batch.old_log_probs
    penalty = settings.kl_cov_weight * change.abs()
    loss = -batch.advantages * change.exp() + torch.where(batch.chosen, penalty, 0.0)
    return loss, {"ppo_kl": change.detach().abs()}


def choose_penalised(batch: Batch, settings: LossSettings, generator: torch.Generator) -> Tensor:
    """The `kl_cov_share` of the written tokens of a mini-batch with the highest covariance.

    Where verl takes them from each micro-batch, by the log-probs of the moment, this is done once, at the step's start:
    the gradient must not depend on how a mini-batch is cut.
    """
    top = covariance(batch).topk(share_of_written(batch, settings.kl_cov_share)).indices
    return torch.zeros_like(batch.response_mask).index_fill_(0, top, True)

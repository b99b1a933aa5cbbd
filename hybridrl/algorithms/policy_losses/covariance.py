"""What each token adds to the covariance of log-prob and advantage, which drives entropy down (Cui et al. 2025)."""

import torch
from torch import Tensor

from hybridrl.batch import Batch


def covariance(batch: Batch) -> Tensor:
    """(A - mean A)(log p - mean log p) a token, means over all written tokens; -inf where the policy did not write it.

    The log-probs are those at the step's start.
    """
    written = batch.response_mask
    product = _centred(batch.advantages, written) * _centred(batch.old_log_probs, written)
    return torch.where(written, product, -torch.inf)


def share_of_written(batch: Batch, share: float) -> int:
    """How many tokens a share of the written ones is: rounded down, but one at least where there are any."""
    written = int(batch.response_mask.sum())
    return min(max(int(share * written), 1), written)


def _centred(values: Tensor, written: Tensor) -> Tensor:
    return values - values[written].mean()

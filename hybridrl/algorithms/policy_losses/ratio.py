"""The probability ratio of policy over old policy, and PPO's window around it. Knows nothing of rows."""

import torch
from torch import Tensor

from hybridrl.algorithms.settings import LossSettings
from hybridrl.batch import Batch


def log_ratio(log_probs: Tensor, batch: Batch) -> Tensor:
    """Logarithm of the ratio a token, clamped to [-20, 20] so that the ratio stays finite."""
    return (log_probs - batch.old_log_probs).clamp(-20, 20)


def clipped_loss(ratio: Tensor, batch: Batch, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """The larger of the losses with the ratio as it is and clipped to its window, and where clipping made it larger."""
    unclipped = -batch.advantages * ratio
    clipped = -batch.advantages * ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return torch.maximum(unclipped, clipped), clipped > unclipped

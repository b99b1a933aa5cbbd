"""The critic's loss."""

import torch
from torch import Tensor

from hybridrl.batch import Batch


def value_loss(values: Tensor, batch: Batch, clip: float) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped value loss a token (as in Schulman et al.'s PPO code, 2017), and statistics a token.

    0.5 max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2): R are the batch's `returns`, v_old its `values`.
    """
    near = values.clamp(batch.values - clip, batch.values + clip)
    free, clipped = (values - batch.returns).square(), (near - batch.returns).square()
    loss = 0.5 * torch.maximum(free, clipped)
    return loss, {"vf_clipfrac": (clipped > free).float(), "vpred_mean": values.detach()}

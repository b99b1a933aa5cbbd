"""From a loss per token to one number: each token's weight, with divisors counted over the whole mini-batch.

The loss of a micro-batch is the sum of weighted token losses, so micro-batches and ranks add up to the same loss
however a mini-batch is cut. The critic's loss per token is here too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.batch import Batch


@dataclass(frozen=True)
class Totals:
    """Counts of a mini-batch over all ranks: tokens the policy wrote, and rows with at least one of them."""

    tokens: int
    rows: int

    @staticmethod
    def of(batch: Batch) -> "Totals":
        return Totals.counted(batch.per_row(batch.response_mask.long()))

    @staticmethod
    def counted(written: Tensor) -> "Totals":
        """From the number of tokens that the policy wrote in each row [B]."""
        return Totals(int(written.sum()), int((written > 0).sum()))


def token_weights(batch: Batch, mode: str, totals: Totals, scale: float = 1.0) -> Tensor:
    """The weight of each response token in the loss [response tokens]; 0 if the policy did not write it.

    token-mean                every token of the mini-batch counts the same (DAPO, Yu et al. 2025)
    token-sum                 every token counts 1
    seq-mean-token-sum        a row counts by the sum of its tokens
    seq-mean-token-mean       every row counts the same (GRPO's paper)
    seq-mean-token-sum-norm   a row counts by the sum of its tokens over a constant `scale` (Dr. GRPO, Liu et al. 2025)

    These are verl's (August 2026), except that a row in which the policy wrote nothing counts in no mean.
    """
    mask = batch.response_mask.float()
    rows = max(totals.rows, 1)
    match mode:
        case "token-mean":
            return mask / max(totals.tokens, 1)
        case "token-sum":
            return mask
        case "seq-mean-token-sum":
            return mask / rows
        case "seq-mean-token-mean":
            return mask / (rows * batch.per_row(mask).clamp(min=1)[batch.response_row])
        case _:
            return mask / (rows * scale)


def value_loss(values: Tensor, batch: Batch, clip: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The critic's loss per token: PPO's clipped value loss (as in Schulman et al.'s code, 2017); statistics per token.

    0.5 max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2): R are the batch's `returns`, v_old its `values`.
    """
    near = values.clamp(batch.values - clip, batch.values + clip)
    free, clipped = (values - batch.returns).square(), (near - batch.returns).square()
    loss = 0.5 * torch.maximum(free, clipped)
    return loss, {"vf_clipfrac": (clipped > free).float(), "vpred_mean": values.detach()}

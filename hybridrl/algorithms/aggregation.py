"""From a loss a token to one number: the weight of each token, with divisors counted over a whole mini-batch.

The loss of a pass is the sum of weighted token losses, so passes and ranks add up to the same loss however a mini-batch
is cut.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.batch import Batch


@dataclass(frozen=True)
class Totals:
    """What a mini-batch holds over all ranks: tokens the policy wrote, and rows with at least one of them."""

    tokens: int
    rows: int

    @staticmethod
    def of(batch: Batch) -> "Totals":
        written = batch.per_row(batch.response_mask.long())
        return Totals(int(written.sum()), int((written > 0).sum()))


def token_weights(batch: Batch, mode: str, totals: Totals, scale: float = 1.0) -> Tensor:
    """The weight of each response token in the loss [response tokens]; 0 where the policy did not write it.

    token-mean                every token of the mini-batch counts the same (DAPO, Yu et al. 2025)
    seq-mean-token-sum        a row counts by the sum of its tokens
    seq-mean-token-mean       every row counts the same (GRPO's paper)
    seq-mean-token-sum-norm   a row counts by the sum of its tokens over a constant `scale` (Dr. GRPO, Liu et al. 2025)
    """
    mask = batch.response_mask.float()
    if mode == "token-mean":
        return mask / max(totals.tokens, 1)
    rows = max(totals.rows, 1)
    if mode == "seq-mean-token-sum":
        return mask / rows
    if mode == "seq-mean-token-mean":
        return mask / (rows * torch.clamp(batch.per_row(mask), min=1)[batch.response_row])
    return mask / (rows * scale)

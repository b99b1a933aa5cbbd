"""From a loss a token to one number: the weight of each token, with divisors counted over a whole mini-batch.

The loss of a pass is the sum of weighted token losses, so passes and ranks add up to the same loss however a mini-batch
is cut.
"""

from dataclasses import dataclass

from torch import Tensor

from hybridrl.batch import Batch


@dataclass(frozen=True)
class Totals:
    """What a mini-batch holds over all ranks: tokens the policy wrote, and rows with at least one of them."""

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
    """The weight of each response token in the loss [response tokens]; 0 where the policy did not write it.

    token-mean                every token of the mini-batch counts the same (DAPO, Yu et al. 2025)
    token-sum                 every token counts 1
    seq-mean-token-sum        a row counts by the sum of its tokens
    seq-mean-token-mean       every row counts the same (GRPO's paper)
    seq-mean-token-sum-norm   a row counts by the sum of its tokens over a constant `scale` (Dr. GRPO, Liu et al. 2025)

    As verl has them (August 2026), but that a row in which the policy wrote nothing counts in no mean.
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

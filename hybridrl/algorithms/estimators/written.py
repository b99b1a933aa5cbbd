"""Values of the tokens that the policy wrote, lying end to end, and their way back to the response axis.

Without tools the policy writes every token: then nothing is picked out, and large steps take half the time.
"""

import torch
from torch import Tensor

from hybridrl.batch import Batch


def written_tokens(batch: Batch) -> tuple[Tensor | slice, Tensor]:
    """What picks the written tokens out of response-axis values, and how many each row has of them [B]."""
    if batch.response_mask.all():
        return slice(None), batch.response_lengths
    written = batch.response_mask.nonzero().squeeze(1)
    ends = torch.searchsorted(written, batch.last_tokens, right=True)
    return written, ends.diff(prepend=ends.new_zeros(1))


def placed(batch: Batch, values: Tensor) -> Tensor:
    """Values of the written tokens, in their places among the response tokens and 0 elsewhere, as float32."""
    if len(values) == len(batch.response_mask):
        return values.float()
    return torch.zeros(batch.response_mask.shape).masked_scatter_(batch.response_mask, values.float())


def spread(batch: Batch, per_row: Tensor) -> Tensor:
    """Each written token gets the value of its row; the others 0. As float32."""
    return per_row.float().repeat_interleave(batch.response_lengths) * batch.response_mask


def whitened(values: Tensor) -> Tensor:
    """Values of mean 0 and variance 1, with n - 1 in the variance and 1e-8 added to it; zeros where n < 2."""
    if len(values) < 2:
        return torch.zeros_like(values)
    centred = values - values.mean()
    # Once more: the mean's rounding error, next to values that are large and alike, would be blown up to a signal.
    centred -= centred.mean()
    return centred.mul_((centred.var() + 1e-8).rsqrt())

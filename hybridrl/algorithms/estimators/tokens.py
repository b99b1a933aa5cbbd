"""The tokens that the policy wrote, picked out of packed rows and put back, and discounted sums over them.

Without tools the policy writes every token: then nothing is picked out, and large steps take half the time.
"""

import torch
from torch import Tensor

from hybridrl.batch import Batch, places

BLOCK = 64
PART = 1 << 18  # elements at a time, or one longer row: re-using the intermediate memory is faster than fresh pages


def written_tokens(batch: Batch) -> tuple[Tensor | slice, Tensor]:
    """An index that picks the written tokens out of response-axis values, and their number in each row [B]."""
    if batch.response_mask.all():
        return slice(None), batch.response_lengths
    written = batch.response_mask.nonzero().squeeze(1)
    ends = torch.searchsorted(written, batch.last_tokens, right=True)
    return written, ends.diff(prepend=ends.new_zeros(1))


def placed(batch: Batch, values: Tensor) -> Tensor:
    """Values of the written tokens at their places among the response tokens, 0 elsewhere, as float32."""
    if len(values) == len(batch.response_mask):
        return values.float()
    return torch.zeros(batch.response_mask.shape).masked_scatter_(batch.response_mask, values.float())


def spread(batch: Batch, per_row: Tensor) -> Tensor:
    """The value of its row on each written token, 0 on the others, as float32."""
    return per_row.float().repeat_interleave(batch.response_lengths) * batch.response_mask


def whitened(values: Tensor) -> Tensor:
    """Values with mean 0 and variance 1, with n - 1 in the variance and 1e-8 added to it; zeros if n < 2."""
    if len(values) < 2:
        return torch.zeros_like(values)
    centred = values - values.mean()
    # Centre twice: if the values are large and almost equal, the mean's rounding error would be scaled up to a signal.
    centred -= centred.mean()
    return centred.mul_((centred.var() + 1e-8).rsqrt())


def discounted_sums(values: Tensor, lengths: Tensor, factor: float) -> Tensor:
    """For each element, the sum of it and the later ones of its row, each times factor ** its distance.

    Rows are packed; `lengths` are theirs [B]. `factor` is in [0, 1].
    """
    lengths = lengths[lengths > 0]
    parts = (lengths.cumsum(0) - 1) // PART  # the part that each row ends in
    rows = lengths.split(parts.unique_consecutive(return_counts=True)[1].tolist())
    sizes = [int(some.sum()) for some in rows]
    sums = torch.empty_like(values)
    for some, given, result in zip(rows, values.split(sizes), sums.split(sizes), strict=True):
        result.copy_(_sums_of_part(given, some, factor))
    return sums


def _sums_of_part(values: Tensor, lengths: Tensor, factor: float) -> Tensor:
    # Rows are cut into blocks. A matrix of powers sums within all blocks at once, and what follows a block is the
    # discounted sum over the first elements of the row's later blocks: the same problem again, BLOCK times smaller.
    blocks = (lengths + BLOCK - 1) // BLOCK
    index = places((blocks.cumsum(0) - blocks) * BLOCK, lengths)
    count = int(blocks.sum())

    powers = (factor ** torch.arange(BLOCK + 1, dtype=torch.float64)).to(values.dtype)
    distance = torch.arange(BLOCK)[:, None] - torch.arange(BLOCK)
    within = powers[distance.clamp(min=0)].tril()
    sums = values.new_zeros(count * BLOCK).scatter_(0, index, values).view(-1, BLOCK) @ within
    if count > len(lengths):
        totals = _sums_of_part(sums[:, 0], blocks, factor**BLOCK)
        sums.addr_(following(totals, blocks), powers[1:].flip(0))
    return sums.flatten().index_select(0, index)


def following(values: Tensor, lengths: Tensor) -> Tensor:
    """For each element, the one after it in its row; 0 for the last of a row."""
    last = lengths.cumsum(0)[lengths > 0] - 1
    return values.roll(-1).index_fill_(0, last, 0)

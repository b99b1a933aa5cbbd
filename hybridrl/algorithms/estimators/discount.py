"""Discounted sums of what is still to come, over rows of different lengths lying end to end."""

import torch
from torch import Tensor

from hybridrl.batch import places

BLOCK = 64
PART = 1 << 18  # elements at a time, or one longer row: the memory in between is used again, which beats fresh pages


def discounted_sums(values: Tensor, lengths: Tensor, factor: float) -> Tensor:
    """For each element, the sum of it and the later ones of its row, each times factor ** its distance.

    `factor` lies in [0, 1].
    """
    lengths = lengths[lengths > 0]
    parts = (lengths.cumsum(0) - 1) // PART  # the one that each row ends in
    rows = lengths.split(parts.unique_consecutive(return_counts=True)[1].tolist())
    sizes = [int(some.sum()) for some in rows]
    sums = torch.empty_like(values)
    for some, given, found in zip(rows, values.split(sizes), sums.split(sizes), strict=True):
        found.copy_(_of_part(given, some, factor))
    return sums


def _of_part(values: Tensor, lengths: Tensor, factor: float) -> Tensor:
    """Rows are cut into blocks: a matrix of powers sums within all blocks at once, and what follows a block is the
    discounted sum over the first elements of the row's later blocks, the same problem again."""
    blocks = (lengths + BLOCK - 1) // BLOCK
    index = places((blocks.cumsum(0) - blocks) * BLOCK, lengths)
    count = int(blocks.sum())

    powers = (factor ** torch.arange(BLOCK + 1, dtype=torch.float64)).to(values.dtype)
    distance = torch.arange(BLOCK)[:, None] - torch.arange(BLOCK)
    within = powers[distance.clamp(min=0)].tril()
    sums = values.new_zeros(count * BLOCK).scatter_(0, index, values).view(-1, BLOCK) @ within
    if count > len(lengths):
        totals = _of_part(sums[:, 0], blocks, factor**BLOCK)
        sums.addr_(following(totals, blocks), powers[1:].flip(0))
    return sums.flatten().index_select(0, index)


def following(values: Tensor, lengths: Tensor) -> Tensor:
    """For each element, the one after it in its row; 0 for a row's last."""
    last = lengths.cumsum(0)[lengths > 0] - 1
    return values.roll(-1).index_fill_(0, last, 0)

"""Discounted sums of what is still to come, over rows of different lengths lying end to end."""

import torch
from torch import Tensor

BLOCK = 64


def discounted_sums(values: Tensor, lengths: Tensor, factor: float) -> Tensor:
    """For each element, the sum of it and the later ones of its row, each times factor ** its distance.

    `factor` lies in [0, 1]. Rows are cut into blocks: a matrix of powers sums within all blocks at once, and what
    follows a block is the discounted sum over the first elements of the row's later blocks, the same problem again.
    """
    lengths = lengths[lengths > 0]
    blocks = (lengths + BLOCK - 1) // BLOCK
    filled = torch.full((int(blocks.sum()),), BLOCK)
    filled[blocks.cumsum(0) - 1] = lengths - (blocks - 1) * BLOCK
    places = (torch.arange(BLOCK) < filled[:, None]).flatten().nonzero().squeeze(1)

    powers = (factor ** torch.arange(BLOCK + 1, dtype=torch.float64)).to(values.dtype)
    distance = torch.arange(BLOCK)[:, None] - torch.arange(BLOCK)
    within = powers[distance.clamp(min=0)].tril()
    sums = values.new_zeros(len(filled) * BLOCK).scatter_(0, places, values).view(-1, BLOCK) @ within
    if len(filled) > len(lengths):
        totals = discounted_sums(sums[:, 0], blocks, factor**BLOCK)
        sums.addr_(following(totals, blocks), powers[1:].flip(0))
    return sums.flatten().index_select(0, places)


def following(values: Tensor, lengths: Tensor) -> Tensor:
    """For each element, the one after it in its row; 0 for a row's last."""
    last = lengths.cumsum(0)[lengths > 0] - 1
    return values.roll(-1).index_fill_(0, last, 0)

"""Statistics over the rows that answer the same prompt, whatever their number. Knows scores a row, not tokens.

All values are one a row [B], in float64: there the mean of equal scores is exactly that score, where a rounding error
would be normalised to a signal. A group of one has no baseline: every estimator built on these gives it the advantage 0
(before whitening, where it whitens), and verl the bare score.
"""

import torch
from torch import Tensor

from hybridrl.batch import Batch

EPSILON = 1e-6  # added to a deviation before it divides


def scores(batch: Batch) -> Tensor:
    """The sum of each row's token rewards."""
    return batch.per_row(batch.token_rewards.double())


def group_sum(values: Tensor, group: Tensor) -> Tensor:
    """For each row, the sum of the values of its group."""
    index = group.unique(return_inverse=True)[1]
    return torch.bincount(index, values)[index]


def group_size(group: Tensor) -> Tensor:
    """For each row, the number of rows in its group."""
    return group_sum(torch.ones(len(group), dtype=torch.float64), group)


def centred(values: Tensor, group: Tensor) -> Tensor:
    """Values less the mean of their group."""
    return values - group_sum(values, group) / group_size(group)


def deviation(values: Tensor, group: Tensor) -> Tensor:
    """For each row, its group's standard deviation with n - 1 in the denominator; 0 for a group of one."""
    squares = group_sum(centred(values, group).square(), group)
    return (squares / (group_size(group) - 1).clamp(min=1)).sqrt()


def normalised(values: Tensor, group: Tensor, by_deviation: bool) -> Tensor:
    """Values less the mean of their group and, `by_deviation`, over its deviation + 1e-6."""
    less_mean = centred(values, group)
    return less_mean / (deviation(values, group) + EPSILON) if by_deviation else less_mean

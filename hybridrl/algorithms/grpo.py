"""Group relative advantages: the other answers to the same prompt are the baseline (GRPO, Shao et al. 2024)."""

import torch
from torch import Tensor

from hybridrl.batch import Batch

EPSILON = 1e-6


def grpo(batch: Batch, normalise: bool = True) -> tuple[Tensor, Tensor]:
    """Advantages and returns of each response token: (score - group mean) / (group standard deviation + 1e-6).

    The score of a row is the sum of its token rewards; the standard deviation has n - 1 in the denominator. Without
    `normalise` it is Dr. GRPO (Liu et al. 2025). Groups may differ in size; in a group of one the advantage is 0.
    """
    # In double precision the mean of equal scores is that score: a rounding error would be normalised to a signal.
    scores = batch.per_row(batch.token_rewards.double())
    advantages = centred(scores, batch.group)
    if normalise:
        advantages = advantages / (group_deviation(advantages, batch.group) + EPSILON)
    per_token = advantages.float()[batch.response_row] * batch.response_mask
    return per_token, per_token


def centred(scores: Tensor, group: Tensor) -> Tensor:
    """Scores less the mean of their group [B]."""
    members, index = _members(group)
    sums = torch.zeros(len(members), dtype=scores.dtype).index_add_(0, index, scores)
    return scores - (sums / members)[index]


def group_deviation(centred_scores: Tensor, group: Tensor) -> Tensor:
    """The sample standard deviation of each row's group [B]; 0 for a group of one."""
    members, index = _members(group)
    squares = torch.zeros(len(members), dtype=centred_scores.dtype).index_add_(0, index, centred_scores.square())
    return (squares / (members - 1).clamp(min=1)).sqrt()[index]


def _members(group: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in each group, and the group number of each row."""
    _, index, members = group.unique(return_inverse=True, return_counts=True)
    return members, index

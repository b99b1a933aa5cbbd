"""Estimators that compare a response with the other responses to the same prompt, its group.

Group statistics are one value per row [B], in float64: there the mean of equal scores is exactly that score, while a
rounding error would be normalized to a signal. A group of one has no baseline: its advantage is 0 (before whitening,
for the estimators that whiten), where verl uses the bare score. Returns are the same as advantages.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridrl.algorithms.estimators.tokens import placed, spread, whitened, written_tokens
from hybridrl.batch import Batch

EPSILON = 1e-6  # added to a deviation before it divides


def grpo(batch: Batch, *, norm_adv_by_std_in_grpo: bool) -> tuple[Tensor, Tensor]:
    """(score - group mean) / (group standard deviation + 1e-6) on every written token (GRPO, Shao et al. 2024).

    Without `norm_adv_by_std_in_grpo` nothing divides: Dr. GRPO (Liu et al. 2025).
    """
    advantages = spread(batch, normalized(scores(batch), batch.group, norm_adv_by_std_in_grpo))
    return advantages, advantages


def grpo_passk(batch: Batch, *, norm_adv_by_std_in_grpo: bool) -> tuple[Tensor, Tensor]:
    """Advantages for the best of k responses (Tang et al. 2025).

    The best row of a group gets its lead over the second best, all others get 0, as do two that are equally good. With
    `norm_adv_by_std_in_grpo` the lead is divided by the group's standard deviation + 1e-6.
    """
    score = scores(batch)
    best_first = score.argsort(descending=True)
    by_group = best_first[batch.group[best_first].argsort(stable=True)]
    members = batch.group.unique(return_counts=True)[1]
    top = (members.cumsum(0) - members)[members > 1]
    best, second = by_group[top], by_group[top + 1]

    leads = torch.zeros_like(score).index_copy_(0, best, score[best] - score[second])
    if norm_adv_by_std_in_grpo:
        leads = leads / (deviation(score, batch.group) + EPSILON)
    advantages = spread(batch, leads)
    return advantages, advantages


def rloo(batch: Batch) -> tuple[Tensor, Tensor]:
    """Score less the mean score of the group's other rows, on every written token (RLOO, Ahmadian et al. 2024)."""
    members = group_size(batch.group)
    # Leaving a row out of its group's mean stretches its distance from that mean by n / (n - 1).
    stretch = members / (members - 1).clamp(min=1)
    advantages = spread(batch, centred(scores(batch), batch.group) * stretch)
    return advantages, advantages


def reinforce_plus_plus_baseline(batch: Batch) -> tuple[Tensor, Tensor]:
    """Score less the group's mean, then whitened over all written tokens (REINFORCE++, Hu et al. 2025)."""
    distances = spread(batch, centred(scores(batch), batch.group))
    advantages = placed(batch, whitened(distances[batch.response_mask]))
    return advantages, advantages


def opo(batch: Batch) -> tuple[Tensor, Tensor]:
    """Score less the group's mean score, rows weighted by their number of written tokens (OPO, Hao et al. 2025)."""
    score, lengths = scores(batch), written_tokens(batch)[1].double()
    baselines = group_sum(lengths * score, batch.group) / group_sum(lengths, batch.group).clamp(min=1)
    advantages = spread(batch, score - baselines)
    return advantages, advantages


def gpg(batch: Batch) -> tuple[Tensor, Tensor]:
    """Score less the group's mean, times alpha, on every written token (group policy gradient, Chu et al. 2025).

    As in verl alpha is the number of the step's rows over that of its rows with a score other than 0; in the paper it
    counts the rows of groups whose scores differ.
    """
    score = scores(batch)
    alpha = len(batch) / score.count_nonzero().clamp(min=1)
    advantages = spread(batch, alpha * centred(score, batch.group))
    return advantages, advantages


def gdpo(batch: Batch, *, norm_adv_by_std_in_grpo: bool, gdpo_reward_weights: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Reward components normalized as GRPO does, weighted and added, then whitened (GDPO, Liu et al. 2026).

    Reads `reward_parts` [B, K] only: `token_rewards`, and so a KL penalty in them, are ignored. Whitening is over all
    written tokens of the step. `gdpo_reward_weights` has K values, or none for equal weights.
    """
    parts = batch.reward_parts.double().unbind(1)
    weights = gdpo_reward_weights or (1.0,) * len(parts)
    weighted = (
        weight * normalized(part, batch.group, norm_adv_by_std_in_grpo)
        for weight, part in zip(weights, parts, strict=True)
    )
    combined = spread(batch, sum(weighted))
    advantages = placed(batch, whitened(combined[batch.response_mask]))
    return advantages, advantages


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


def normalized(values: Tensor, group: Tensor, by_deviation: bool) -> Tensor:
    """Values less the mean of their group and, `by_deviation`, divided by its deviation + 1e-6."""
    less_mean = centred(values, group)
    return less_mean / (deviation(values, group) + EPSILON) if by_deviation else less_mean

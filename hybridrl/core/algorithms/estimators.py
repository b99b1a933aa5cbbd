"""Advantage estimators: from a step's rewards to the advantage of each response token.

An estimator sees the rows of the whole step with `token_rewards` filled; a row's score is the sum of its token rewards.
It returns advantages and returns [response tokens] as float32, 0 on tokens that the policy did not write;
and, optionally, metrics.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridrl.core.batch import Batch, places
from hybridrl.required import required

Advantages = tuple[Tensor, Tensor]  # advantages and returns [response tokens]
BLOCK = 64
PART = 1 << 18  # elements at a time, or one longer row: re-using the intermediate memory is faster than fresh pages


# -- comparing a response with the other responses to the same prompt, its group ---------------------------------------

# Group statistics are one value per row [B], in float64: there the mean of equal scores is exactly that score, while a
# rounding error would be normalized to a signal. A group of one has no baseline: its advantage is 0 (in estimators with
# whitening: before it). verl uses the bare score instead. Returns are the same as advantages.


def no_advantages(batch: Batch) -> Advantages:
    """Zeros, of a policy that does not learn from rewards."""
    zeros = torch.zeros(batch.response_ids.shape)
    return zeros, zeros


def grpo(batch: Batch, *, norm_adv_by_std_in_grpo: bool) -> Advantages:
    """(score - group mean) / (group standard deviation + 1e-6) on every written token (GRPO, Shao et al. 2024).

    Without `norm_adv_by_std_in_grpo` nothing divides: Dr. GRPO (Liu et al. 2025).
    """
    advantages = spread(batch, normalized(scores(batch), batch.group, norm_adv_by_std_in_grpo))
    return advantages, advantages


def grpo_passk(batch: Batch, *, norm_adv_by_std_in_grpo: bool) -> Advantages:
    """Advantages for the best of k responses (Tang et al. 2025). The best row of a group gets its lead over the second
    best, all others get 0, as do two that are equally good. With `norm_adv_by_std_in_grpo` the lead is divided by the
    group's standard deviation + 1e-6."""
    score = scores(batch)
    best_first = score.argsort(descending=True)
    by_group = best_first[batch.group[best_first].argsort(stable=True)]
    members = batch.group.unique(return_counts=True)[1]
    top = (members.cumsum(0) - members)[members > 1]
    best, second = by_group[top], by_group[top + 1]

    leads = torch.zeros_like(score).index_copy_(0, best, score[best] - score[second])
    if norm_adv_by_std_in_grpo:
        leads = leads / (deviation(score, batch.group) + 1e-6)
    advantages = spread(batch, leads)
    return advantages, advantages


def rloo(batch: Batch) -> Advantages:
    """Score less the mean score of the group's other rows, on every written token (RLOO, Ahmadian et al. 2024)."""
    members = group_size(batch.group)
    # Leaving a row out of its group's mean stretches its distance from that mean by n / (n - 1).
    stretch = members / (members - 1).clamp(min=1)
    advantages = spread(batch, centred(scores(batch), batch.group) * stretch)
    return advantages, advantages


def reinforce_plus_plus_baseline(batch: Batch) -> Advantages:
    """Score less the group's mean, then whitened over all written tokens (REINFORCE++, Hu et al. 2025)."""
    distances = spread(batch, centred(scores(batch), batch.group))
    advantages = placed(batch, whitened(distances[batch.response_mask]))
    return advantages, advantages


def opo(batch: Batch) -> Advantages:
    """Score less the group's mean score, rows weighted by their number of written tokens (OPO, Hao et al. 2025)."""
    score, lengths = scores(batch), written_tokens(batch)[1].double()
    baselines = group_sum(lengths * score, batch.group) / group_sum(lengths, batch.group).clamp(min=1)
    advantages = spread(batch, score - baselines)
    return advantages, advantages


def gpg(batch: Batch) -> Advantages:
    """Score less the group's mean, times alpha, on every written token (group policy gradient, Chu et al. 2025). As in
    verl alpha is the number of all rows of the step over the number of rows with a score other than 0; the paper
    divides by the rows of groups with differing scores."""
    score = scores(batch)
    alpha = len(batch) / score.count_nonzero().clamp(min=1)
    advantages = spread(batch, alpha * centred(score, batch.group))
    return advantages, advantages


def gdpo(batch: Batch, *, norm_adv_by_std_in_grpo: bool, gdpo_reward_weights: Sequence[float]) -> Advantages:
    """Reward components normalized as GRPO does, weighted and added, then whitened (GDPO, Liu et al. 2026). Reads
    `reward_parts` [B, K] only: `token_rewards`, and so a KL penalty in them, are ignored. Whitening is over all written
    tokens of the step. `gdpo_reward_weights` has K values, or none for equal weights."""
    parts = required(batch.reward_parts).double().unbind(1)
    weights = gdpo_reward_weights or (1.0,) * len(parts)
    weighted = (
        weight * normalized(part, batch.group, norm_adv_by_std_in_grpo)
        for weight, part in zip(weights, parts, strict=True)
    )
    combined = spread(batch, sum(weighted, torch.zeros(())))
    advantages = placed(batch, whitened(combined[batch.response_mask]))
    return advantages, advantages


def scores(batch: Batch) -> Tensor:
    """The sum of each row's token rewards."""
    return batch.per_row(required(batch.token_rewards).double())


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
    return less_mean / (deviation(values, group) + 1e-6) if by_deviation else less_mean


# -- advantages that differ from token to token: they start from the rewards to come -----------------------------------


def gae(batch: Batch, *, gamma: float, lam: float) -> Advantages:
    """Generalized advantage estimation (Schulman et al. 2016): the critic's values are the baseline.

    Sums of the residuals r + gamma * V(next) - V, each discounted by gamma * lam per token; then whitened. As in verl,
    "next" is the next written token, rewards on tokens that the policy did not write are ignored, and whitening is
    over all written tokens of the step. Returns are the advantages before whitening plus the values.
    """
    written, lengths = written_tokens(batch)
    values = required(batch.values)[written]
    residuals = following(values, lengths).mul_(gamma).add_(required(batch.token_rewards)[written]).sub_(values)
    advantages = discounted_sums(residuals, lengths, gamma * lam)
    return placed(batch, whitened(advantages)), placed(batch, advantages + values)


def reinforce_plus_plus(batch: Batch, *, gamma: float) -> Advantages:
    """Rewards to come, discounted by gamma per token; advantages are these returns whitened (Hu et al. 2025). As in
    verl, tokens that the policy did not write are skipped: they are not discounted, and rewards on them are ignored."""
    written, lengths = written_tokens(batch)
    returns = discounted_sums(required(batch.token_rewards)[written], lengths, gamma)
    return placed(batch, whitened(returns)), placed(batch, returns)


def remax(batch: Batch) -> Advantages:
    """Rewards to come, undiscounted, less the total reward of the prompt's greedy response (ReMax, Li et al. 2023). A
    reward on a token that the policy did not write is ignored."""
    written, lengths = written_tokens(batch)
    returns = discounted_sums(required(batch.token_rewards)[written], lengths, 1.0)
    baselines = required(batch.greedy_rewards).repeat_interleave(lengths)
    return placed(batch, returns - baselines), placed(batch, returns)


def optimal_token_baseline(batch: Batch) -> Advantages:
    """Rewards to come, undiscounted, less their weighted mean over the group's rows at the same position.

    Li et al. 2026. The weight of a token is the sum of 1 - 2 pi + (sum of pi^2) over its row's tokens up to it, which
    approximates the squared norm of their gradients; each term times `importance_weights` squared if these are filled.
    Only written tokens are summed. A position written by a single row of a group has no baseline: it keeps its return.
    In verl this holds for the longest row's tail only; both agree for rows without holes.
    """
    return _less_baseline(batch, _positions(batch.response_lengths)[batch.response_mask])


def tir_optimal_token_baseline(batch: Batch) -> Advantages:
    """`optimal_token_baseline` for turns with tools: a position is the number of written tokens before it."""
    return _less_baseline(batch, _positions(written_tokens(batch)[1]))


def _less_baseline(batch: Batch, positions: Tensor) -> Advantages:
    written, lengths = written_tokens(batch)
    rows = batch.response_row[written]
    returns = discounted_sums(required(batch.token_rewards)[written].double(), lengths, 1.0)
    sizes = 1 - 2 * required(batch.old_log_probs).double().exp() + required(batch.sum_pi_squared)
    if batch.importance_weights is not None:
        sizes = sizes * batch.importance_weights.square()
    sizes = sizes.clamp(min=0)  # 0 for a token of probability 1, which rounding makes negative
    # The sum up to a token is a discounted sum of later values in reversed order.
    weights = discounted_sums(sizes[written].flip(0), lengths.flip(0), 1.0).flip(0)

    cells = batch.group.unique(return_inverse=True)[1][rows] * int(batch.response_lengths.max()) + positions
    weighted = torch.bincount(cells, returns * weights)
    baselines = (weighted / (torch.bincount(cells, weights) + 1e-8))[cells]
    baselines = baselines.masked_fill(cells.bincount()[cells] == 1, 0)
    advantages = (returns - baselines) * (group_size(batch.group) > 1)[rows]
    return placed(batch, advantages), placed(batch, returns)


def _positions(lengths: Tensor) -> Tensor:
    """0, 1, 2, ... in each of the packed rows of these lengths."""
    return places(torch.zeros_like(lengths), lengths)


# -- picking out the written tokens and putting them back, and discounted sums over them -------------------------------


def written_tokens(batch: Batch) -> tuple[Tensor | slice, Tensor]:
    """Return an index of the written tokens (those of `response_mask`) among the response tokens, and their number per
    row [B]. Without tools the policy writes every token: then the index is a full slice, and large steps take half the
    time."""
    mask = required(batch.response_mask)
    if mask.all():
        return slice(None), batch.response_lengths
    written = mask.nonzero().squeeze(1)
    ends = torch.searchsorted(written, batch.last_tokens, right=True)
    return written, ends.diff(prepend=ends.new_zeros(1))


def placed(batch: Batch, values: Tensor) -> Tensor:
    """Values of the written tokens at their places among the response tokens, 0 elsewhere, as float32."""
    mask = required(batch.response_mask)
    return values.float() if len(values) == len(mask) else torch.zeros(mask.shape).masked_scatter_(mask, values.float())


def spread(batch: Batch, per_row: Tensor) -> Tensor:
    """Return each row's value on its written tokens, 0 on the others, as float32."""
    return per_row.float().repeat_interleave(batch.response_lengths) * required(batch.response_mask)


def whitened(values: Tensor) -> Tensor:
    """Values with mean 0 and variance 1, with n - 1 in the variance and 1e-8 added to it; zeros if n < 2."""
    if len(values) < 2:
        return torch.zeros_like(values)
    centred = values - values.mean()
    # Centre twice: if the values are large and almost equal, the mean's rounding error would be scaled up to a signal.
    centred -= centred.mean()
    return centred.mul_((centred.var() + 1e-8).rsqrt())


def discounted_sums(values: Tensor, lengths: Tensor, factor: float) -> Tensor:
    """For each element, the sum of it and the later ones of its row, each times factor ** its distance. Rows are
    packed, with these `lengths` [B]. `factor` is in [0, 1]."""
    lengths = lengths[lengths > 0]
    parts = (lengths.cumsum(0) - 1) // PART  # the part that each row ends in
    rows = lengths.split(parts.unique_consecutive(return_counts=True)[1].tolist())
    sizes = [int(part.sum()) for part in rows]
    sums = torch.empty_like(values)
    for part, of_part, result in zip(rows, values.split(sizes), sums.split(sizes), strict=True):
        result.copy_(_sums_of_part(of_part, part, factor))
    return sums


def _sums_of_part(values: Tensor, lengths: Tensor, factor: float) -> Tensor:
    # Rows are cut into blocks. A matrix of powers sums within all blocks at once. The rest, after a block, is the
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

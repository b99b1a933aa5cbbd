"""Estimators whose advantages differ from token to token: they start from the rewards to come."""

import torch
from torch import Tensor

from hybridrl.algorithms.estimators.group_baselines import group_size
from hybridrl.algorithms.estimators.tokens import discounted_sums, following, placed, whitened, written_tokens
from hybridrl.batch import Batch, places

EPSILON = 1e-8  # added to a sum of weights before it divides


def gae(batch: Batch, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016): the critic's values are the baseline.

    Sums of the residuals r + gamma * V(next) - V, each discounted by gamma * lam per token; then whitened. As in verl,
    "next" is the next token that the policy wrote, a reward on a token that it did not write is ignored, and whitening
    is over all written tokens of the step. Returns are the advantages before whitening plus the values.
    """
    written, lengths = written_tokens(batch)
    values = batch.values[written]
    residuals = following(values, lengths).mul_(gamma).add_(batch.token_rewards[written]).sub_(values)
    advantages = discounted_sums(residuals, lengths, gamma * lam)
    return placed(batch, whitened(advantages)), placed(batch, advantages + values)


def reinforce_plus_plus(batch: Batch, *, gamma: float) -> tuple[Tensor, Tensor]:
    """Rewards to come, discounted by gamma per token; advantages are these returns whitened (Hu et al. 2025).

    As in verl, tokens that the policy did not write are skipped: they are not discounted, and rewards on them are
    ignored.
    """
    written, lengths = written_tokens(batch)
    returns = discounted_sums(batch.token_rewards[written], lengths, gamma)
    return placed(batch, whitened(returns)), placed(batch, returns)


def remax(batch: Batch) -> tuple[Tensor, Tensor]:
    """Rewards to come, undiscounted, less the total reward of the prompt's greedy response (ReMax, Li et al. 2023).

    A reward on a token that the policy did not write is ignored.
    """
    written, lengths = written_tokens(batch)
    returns = discounted_sums(batch.token_rewards[written], lengths, 1.0)
    baselines = batch.greedy_rewards.repeat_interleave(lengths)
    return placed(batch, returns - baselines), placed(batch, returns)


def optimal_token_baseline(batch: Batch) -> tuple[Tensor, Tensor]:
    """Rewards to come, undiscounted, less their weighted mean over the group's rows at the same position.

    Li et al. 2026. The weight of a token is the sum of 1 - 2 pi + (sum of pi^2) over its row's tokens up to it, which
    approximates the squared norm of their gradients; each term times `importance_weights` squared if these are filled.
    Only written tokens are summed. A position that a single row of a group has written has no baseline: it keeps its
    return. In verl that holds for the longest row's tail only; the two agree for rows without holes.
    """
    return _less_baseline(batch, _positions(batch.response_lengths)[batch.response_mask])


def tir_optimal_token_baseline(batch: Batch) -> tuple[Tensor, Tensor]:
    """`optimal_token_baseline` for turns with tools: a position is the number of written tokens before it."""
    return _less_baseline(batch, _positions(written_tokens(batch)[1]))


def _less_baseline(batch: Batch, positions: Tensor) -> tuple[Tensor, Tensor]:
    written, lengths = written_tokens(batch)
    rows = batch.response_row[written]
    returns = discounted_sums(batch.token_rewards[written].double(), lengths, 1.0)
    # The sum up to a token is the sum of what is to come, read backwards.
    weights = discounted_sums(_gradient_sizes(batch)[written].flip(0), lengths.flip(0), 1.0).flip(0)

    cells = batch.group.unique(return_inverse=True)[1][rows] * int(batch.response_lengths.max()) + positions
    weighted = torch.bincount(cells, returns * weights)
    baselines = (weighted / (torch.bincount(cells, weights) + EPSILON))[cells]
    baselines = baselines.masked_fill(cells.bincount()[cells] == 1, 0)
    advantages = (returns - baselines) * (group_size(batch.group) > 1)[rows]
    return placed(batch, advantages), placed(batch, returns)


def _gradient_sizes(batch: Batch) -> Tensor:
    """Squared norm of the gradient of each token's log-prob by the logits [response tokens], as float64."""
    sizes = 1 - 2 * batch.old_log_probs.double().exp() + batch.sum_pi_squared
    if batch.importance_weights is not None:
        sizes = sizes * batch.importance_weights.square()
    return sizes.clamp(min=0)  # 0 for a token of probability 1, which rounding makes negative


def _positions(lengths: Tensor) -> Tensor:
    """0, 1, 2, ... in each of the packed rows of these lengths."""
    return places(torch.zeros_like(lengths), lengths)

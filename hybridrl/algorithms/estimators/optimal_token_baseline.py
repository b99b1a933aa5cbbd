"""A baseline for each token position of a group, weighted by the size of the gradient up to it (Li et al. 2026)."""

import torch
from torch import Tensor

from hybridrl.algorithms.estimators.discount import discounted_sums
from hybridrl.algorithms.estimators.groups import group_size
from hybridrl.algorithms.estimators.written import placed, written_tokens
from hybridrl.algorithms.settings import AdvantageSettings
from hybridrl.batch import Batch, places

EPSILON = 1e-8  # added to a sum of weights before it divides


def optimal_token_baseline(batch: Batch, settings: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """Rewards to come, undiscounted, less their weighted mean over the group's rows at the same position.

    The weight of a token is the sum of 1 - 2 pi + (sum of pi^2) over its row's tokens up to it, a stand-in for the
    squared norm of their gradients; each term times `importance_weights` squared where these are filled. Only written
    tokens are summed. A position that one row of a group alone has written has no baseline: it keeps its return. In
    verl that holds for the longest row's tail alone; the two agree where rows have no holes.
    """
    return _less_baseline(batch, _positions(batch.response_lengths)[batch.response_mask])


def tir_optimal_token_baseline(batch: Batch, settings: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """The same for turns with tools: a position is the number of written tokens before it."""
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
    return sizes.clamp(min=0)  # a sure token's is 0, and rounding makes it negative


def _positions(lengths: Tensor) -> Tensor:
    """0, 1, 2, ... in each row, rows of these lengths end to end."""
    return places(torch.zeros_like(lengths), lengths)

"""Rows to try estimators on, and what their references share: plain loops over rows and tokens in double precision."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from hybridrl.core.batch import Batch

SEEDS = st.integers(0, 2**32)
Rows = list[list[float]]  # a value a token, or a score as a row of one


def drawn(make_batch: Callable[..., Batch], seed: int) -> Batch:
    """One to nine rows of 1 to 9 tokens in groups of any size, with all fields filled.

    In most batches about a third of the tokens are not written, in some all are. About half of the rewards are 0, and
    every third batch has equal scores in it.
    """
    draw = np.random.default_rng(seed)
    count = int(draw.integers(1, 10))
    lengths = draw.integers(1, 10, count)
    tokens = int(lengths.sum())
    probability = draw.uniform(0.05, 0.95, tokens)
    fields = {
        "token_rewards": draw.normal(0, 1, tokens).round(seed % 3) * draw.integers(0, 2, tokens),
        "values": draw.normal(0, 1, tokens),
        "greedy_rewards": draw.normal(0, 1, count),
        "reward_parts": draw.normal(0, 1, (count, 3)),
        "old_log_probs": np.log(probability),
        "sum_pi_squared": probability**2 + (1 - probability) ** 2 * draw.uniform(0.1, 1, tokens),
    }
    return make_batch(
        lengths.tolist(),
        group=draw.integers(0, 4, count).tolist(),
        response_mask=torch.from_numpy(draw.random(tokens) < (1 if seed % 5 == 4 else 0.7)),
        **{name: torch.from_numpy(value).float() for name, value in fields.items()},
    )


def on_last_token(answers: Sequence[int], scores: Sequence[float]) -> Tensor:
    """Token rewards of rows whose whole score lies on the last token."""
    return torch.cat([torch.tensor([0.0] * (n - 1) + [s]) for n, s in zip(answers, scores, strict=True)])


def one_group(make_batch: Callable[..., Batch], scores: Sequence[float]) -> Batch:
    """Rows of 1, 2, 3, 1, ... tokens that all answer the same prompt."""
    answers = [1 + row % 3 for row in range(len(scores))]
    return make_batch(answers, group=[0] * len(scores), token_rewards=on_last_token(answers, scores))


def by_row(batch: Batch, values: Tensor) -> Rows:
    """Response-axis values, a list a row."""
    return [row.tolist() for row in values.double().split(batch.response_lengths.tolist())]


def flat(rows: Rows) -> list[float]:
    return [value for row in rows for value in row]


def scores(batch: Batch) -> list[float]:
    return [sum(row) for row in by_row(batch, batch.token_rewards)]


def group_mates(batch: Batch, row: int) -> list[int]:
    """The rows of a row's group, itself among them."""
    return [other for other in range(len(batch)) if batch.group[other] == batch.group[row]]


def on_tokens(batch: Batch, per_row: Sequence[float]) -> Rows:
    """A row's value on each of its written tokens, 0 on the others."""
    written = by_row(batch, batch.response_mask)
    return [[value if mine else 0.0 for mine in row] for value, row in zip(per_row, written, strict=True)]


def whitened(batch: Batch, rows: Rows) -> Rows:
    """Mean 0 and sample variance 1 over all written tokens; 0 on the others, and where there is but one."""
    mask = by_row(batch, batch.response_mask)
    written = [value for value, mine in zip(flat(rows), flat(mask), strict=True) if mine]
    if len(written) < 2:
        return [[0.0 for _ in row] for row in rows]
    mean, deviation = np.mean(written), np.sqrt(np.var(written, ddof=1) + 1e-8)
    return [
        [(value - mean) / deviation if mine else 0.0 for value, mine in zip(row, written_row, strict=True)]
        for row, written_row in zip(rows, mask, strict=True)
    ]

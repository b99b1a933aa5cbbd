"""Rows to try estimators on, and every estimator as a plain loop over rows and tokens in double precision."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridrl.core.batch import Batch
from hybridrl.required import required

Rows = list[list[float]]  # one value per token
Both = tuple[Rows, Rows]  # advantages and returns


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


def flat(rows: Rows) -> list[float]:
    return [value for row in rows for value in row]


def by_row(batch: Batch, *fields: Tensor | None) -> Iterator[tuple[list[float], ...]]:
    """Yield, for each row, the list of its values of each field."""
    lengths = batch.response_lengths.tolist()
    return zip(*([row.tolist() for row in required(field).double().split(lengths)] for field in fields), strict=True)


def scores(batch: Batch) -> list[float]:
    return [sum(rewards) for (rewards,) in by_row(batch, batch.token_rewards)]


def group_mates(batch: Batch, row: int) -> list[int]:
    """Return the rows of a row's group, itself among them."""
    return [other for other in range(len(batch)) if batch.group[other] == batch.group[row]]


def on_tokens(batch: Batch, per_row: Sequence[float]) -> Both:
    """Return a row's value on each of its written tokens, 0 on the others; as advantages and as returns."""
    masks = by_row(batch, batch.response_mask)
    rows = [[value if mine else 0.0 for mine in mask] for value, (mask,) in zip(per_row, masks, strict=True)]
    return rows, rows


def placed(mask: Sequence[float], values: Sequence[float]) -> list[float]:
    """Return the values of written tokens at their places in a row."""
    left = iter(values)
    return [next(left) if mine else 0.0 for mine in mask]


def whitened(batch: Batch, rows: Rows) -> Rows:
    """Return rows with mean 0 and sample variance 1 over all written tokens; 0 on the others, and for a single one."""
    written = [value for value, mine in zip(flat(rows), required(batch.response_mask).tolist(), strict=True) if mine]
    if len(written) < 2:
        return [[0.0 for _ in row] for row in rows]
    values = iter((np.array(written) - np.mean(written)) / np.sqrt(np.var(written, ddof=1) + 1e-8))
    return [placed(mask, [next(values) for mine in mask if mine]) for (mask,) in by_row(batch, batch.response_mask)]


def normalized(batch: Batch, values: Sequence[float], by_deviation: bool) -> list[float]:
    """Return the distances from the mean of the group, in its deviations."""
    found = []
    for row, value in enumerate(values):
        group = [values[mate] for mate in group_mates(batch, row)]
        deviation = np.std(group, ddof=1) + 1e-6 if by_deviation and len(group) > 1 else 1.0
        found.append((value - np.mean(group)) / deviation)
    return found


def grpo(batch: Batch, *, norm_adv_by_std_in_grpo: bool, **_: Any) -> Both:
    return on_tokens(batch, normalized(batch, scores(batch), norm_adv_by_std_in_grpo))


def grpo_passk(batch: Batch, *, norm_adv_by_std_in_grpo: bool, **_: Any) -> Both:
    found, of_rows = [], scores(batch)
    for row in range(len(batch)):
        mates = sorted(group_mates(batch, row), key=lambda mate: (-of_rows[mate], mate))
        lead = of_rows[row] - of_rows[mates[1]] if mates[0] == row and len(mates) > 1 else 0.0
        deviation = np.std([of_rows[mate] for mate in mates], ddof=1) + 1e-6 if lead else 1.0
        found.append(lead / deviation if norm_adv_by_std_in_grpo else lead)
    return on_tokens(batch, found)


def rloo(batch: Batch, **_: Any) -> Both:
    found, of_rows = [], scores(batch)
    for row, score in enumerate(of_rows):
        others = [of_rows[mate] for mate in group_mates(batch, row) if mate != row]
        found.append(score - np.mean(others) if others else 0.0)
    return on_tokens(batch, found)


def opo(batch: Batch, **_: Any) -> Both:
    lengths = [sum(mask) for (mask,) in by_row(batch, batch.response_mask)]
    found, of_rows = [], scores(batch)
    for row, score in enumerate(of_rows):
        mates = group_mates(batch, row)
        weighted, total = sum(lengths[mate] * of_rows[mate] for mate in mates), sum(lengths[mate] for mate in mates)
        found.append(score - weighted / total if total else 0.0)
    return on_tokens(batch, found)


def gpg(batch: Batch, **_: Any) -> Both:
    alpha = len(batch) / max(sum(score != 0 for score in scores(batch)), 1)
    return on_tokens(batch, [alpha * distance for distance in normalized(batch, scores(batch), False)])


def gdpo(batch: Batch, *, norm_adv_by_std_in_grpo: bool, gdpo_reward_weights: Sequence[float], **_: Any) -> Both:
    parts = [
        normalized(batch, part, norm_adv_by_std_in_grpo) for part in required(batch.reward_parts).double().T.tolist()
    ]
    rows = whitened(batch, on_tokens(batch, np.array(gdpo_reward_weights or (1, 1, 1)) @ np.array(parts))[0])
    return rows, rows


def reinforce_plus_plus_baseline(batch: Batch, **_: Any) -> Both:
    rows = whitened(batch, on_tokens(batch, normalized(batch, scores(batch), False))[0])
    return rows, rows


def to_come(batch: Batch, gamma: float) -> Rows:
    """Return each written token's rewards to come on written tokens, a discount for each of them between."""
    found = []
    for rewards, mask in by_row(batch, batch.token_rewards, batch.response_mask):
        written = [reward for reward, mine in zip(rewards, mask, strict=True) if mine]
        sums = [
            sum(gamma**later * reward for later, reward in enumerate(written[first:])) for first in range(len(written))
        ]
        found.append(placed(mask, sums))
    return found


def reinforce_plus_plus(batch: Batch, *, gamma: float, **_: Any) -> Both:
    returns = to_come(batch, gamma)
    return whitened(batch, returns), returns


def remax(batch: Batch, **_: Any) -> Both:
    returns, greedy = to_come(batch, 1.0), required(batch.greedy_rewards).tolist()
    masks = [mask for (mask,) in by_row(batch, batch.response_mask)]
    rows = zip(returns, greedy, masks, strict=True)
    return [[(value - less) * mine for value, mine in zip(row, mask, strict=True)] for row, less, mask in rows], returns


def gae(batch: Batch, *, gamma: float, lam: float, **_: Any) -> Both:
    """Equation 16 of the paper on the written tokens of each row; returns are advantages plus values."""
    advantages, returns = [], []
    for mask, *fields in by_row(batch, batch.response_mask, batch.token_rewards, batch.values):
        tokens = [token for mine, *token in zip(mask, *fields, strict=True) if mine]
        later = [value for _, value in tokens[1:]] + [0.0] * bool(tokens)
        residuals = [reward + gamma * after - value for (reward, value), after in zip(tokens, later, strict=True)]
        sums = [
            sum((gamma * lam) ** distance * r for distance, r in enumerate(residuals[first:]))
            for first in range(len(residuals))
        ]
        advantages.append(placed(mask, sums))
        returns.append(placed(mask, [total + value for total, (_, value) in zip(sums, tokens, strict=True)]))
    return whitened(batch, advantages), returns


def optimal_token_baseline(batch: Batch, *, among_written: bool = False, **_: Any) -> Both:
    """Each written token's return less the weighted mean of the group's rows at its position."""
    returns = to_come(batch, 1.0)
    importance = torch.ones(len(batch.response_ids)) if batch.importance_weights is None else batch.importance_weights
    fields = (batch.response_mask, batch.old_log_probs, batch.sum_pi_squared, importance)
    at: list[dict[int, tuple[float, float]]] = []  # by row and position, the return and its weight
    for row, of_row in enumerate(by_row(batch, *fields)):
        total, positions = 0.0, {}
        for step, (mine, log_prob, squares, ratio) in enumerate(zip(*of_row, strict=True)):
            if mine:
                total += (1 - 2 * math.exp(log_prob) + squares) * ratio**2
                positions[len(positions) if among_written else step] = (returns[row][step], total)
        at.append(positions)
    advantages = []
    for row, (mask,) in enumerate(by_row(batch, batch.response_mask)):
        mates, values = group_mates(batch, row), []
        for position, (value, _) in at[row].items():
            there = [at[mate][position] for mate in mates if position in at[mate]]
            baseline = sum(g * w for g, w in there) / (sum(w for _, w in there) + 1e-8) if len(there) > 1 else 0.0
            values.append(value - baseline if len(mates) > 1 else 0.0)
        advantages.append(placed(mask, values))
    return advantages, returns


def tir_optimal_token_baseline(batch: Batch, **_: Any) -> Both:
    return optimal_token_baseline(batch, among_written=True)

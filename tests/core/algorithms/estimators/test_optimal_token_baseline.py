import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.core.algorithms.estimators import optimal_token_baseline, tir_optimal_token_baseline
from tests.core.algorithms.estimators.rows import SEEDS, by_row, drawn, flat, group_mates

# Rewards to come and weights, by row and position; positions that are not written have none.
Positions = list[dict[int, tuple[float, float]]]


def positions(batch, among_written) -> Positions:
    fields = [batch.response_mask, batch.token_rewards, batch.old_log_probs, batch.sum_pi_squared]
    fields.append(torch.ones(len(batch.response_ids)) if batch.importance_weights is None else batch.importance_weights)
    found = []
    for rows in zip(*(by_row(batch, field) for field in fields), strict=True):
        tokens = [token for token in enumerate(zip(*rows, strict=True)) if token[1][0]]
        weight, row = 0.0, {}
        for number, (step, (_, _, log_prob, squares, importance)) in enumerate(tokens):
            weight += (1 - 2 * math.exp(log_prob) + squares) * importance**2
            to_come = sum(reward for later, (_, reward, *_) in tokens if later >= step)
            row[number if among_written else step] = (to_come, weight)
        found.append(row)
    return found


def reference(batch, tools):
    """A written token at a time: its return less the weighted mean over the group's rows at its position."""
    found, all_rows = [], positions(batch, among_written=tools)
    for row, mask in enumerate(by_row(batch, batch.response_mask)):
        mates = group_mates(batch, row)
        values = []
        for position, (to_come, _) in all_rows[row].items():
            there = [all_rows[mate][position] for mate in mates if position in all_rows[mate]]
            baseline = sum(g * w for g, w in there) / (sum(w for _, w in there) + 1e-8)
            if len(there) == 1:
                baseline = 0.0
            values.append(to_come - baseline if len(mates) > 1 else 0.0)
        remaining = iter(values)
        found.append([next(remaining) if mine else 0.0 for mine in mask])
    return found


@pytest.fixture(scope="module")
def two_rows(make_batch):
    """Weights of the first row 0.5 and 1, of the second 1.5 and nothing: it wrote one token, after a tool's."""
    half = math.log(0.5)
    return make_batch(
        [2, 2],
        group=[0, 0],
        token_rewards=[0.0, 4.0, 7.0, 1.0],
        response_mask=[True, True, False, True],
        old_log_probs=[half, half, 0.0, half],
        sum_pi_squared=[0.5, 0.5, 1.0, 1.5],
    )


def test_returns_at_a_position_are_weighted_by_the_gradients_up_to_it_and_a_lone_one_has_no_baseline(two_rows):
    # Position 1: returns 4 and 1 with weights 1 and 1.5 have the mean 5.5 / 2.5 = 2.2. Position 0 has one row alone.
    advantages, returns = optimal_token_baseline(two_rows)
    assert returns.tolist() == [4, 4, 0, 1]
    assert advantages.tolist() == pytest.approx([4, 1.8, 0, -1.2], abs=1e-6)


def test_with_tools_positions_are_those_among_written_tokens(two_rows):
    # Position 0: returns 4 and 1 with weights 0.5 and 1.5 have the mean 3.5 / 2 = 1.75. Position 1 has one row.
    advantages, returns = tir_optimal_token_baseline(two_rows)
    assert returns.tolist() == [4, 4, 0, 1]
    assert advantages.tolist() == pytest.approx([2.25, 4, 0, -0.75], abs=1e-6)


def test_importance_weights_count_squared(make_batch):
    # Weights 1 * 0.5 ** 2 and 1: returns 4 and 1 have the mean 2 / 1.25 = 1.6.
    batch = make_batch(
        [1, 1],
        group=[0, 0],
        token_rewards=[4.0, 1.0],
        old_log_probs=[math.log(0.5)] * 2,
        sum_pi_squared=[1.0, 1.0],
        importance_weights=[0.5, 1.0],
    )
    assert optimal_token_baseline(batch)[0].tolist() == pytest.approx([2.4, -0.6])


def test_rounding_in_a_sure_tokens_probabilities_does_not_blow_the_baseline_up(make_batch):
    # 1 - 2 pi + pi^2 comes out as -1e-7 rather than 0: weights that would add up to less than nothing.
    batch = make_batch(
        [1, 1], group=[0, 0], token_rewards=[4.0, 1.0], old_log_probs=[0.0, 0.0], sum_pi_squared=[1 - 1e-7, 1 - 1e-7]
    )
    assert optimal_token_baseline(batch)[0].tolist() == pytest.approx([4, 1])


@given(SEEDS, st.booleans(), st.booleans())
def test_it_agrees_with_a_double_precision_reference(make_batch, seed, tools, corrected):
    batch = drawn(make_batch, seed)
    if corrected:
        batch.importance_weights = 0.5 + batch.sum_pi_squared
    estimator = tir_optimal_token_baseline if tools else optimal_token_baseline
    found, _ = estimator(batch)
    assert found.tolist() == pytest.approx(flat(reference(batch, tools)), rel=1e-6, abs=1e-6)

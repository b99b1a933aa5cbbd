import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.core.algorithms.estimators import gae
from tests.core.algorithms.estimators.rows import SEEDS, by_row, drawn, flat, whitened

FACTORS = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def reference(batch, gamma, lam):
    """Equation 16 of the paper on the written tokens of each row; returns are advantages plus values."""
    rows = zip(
        *(by_row(batch, field) for field in (batch.response_mask, batch.token_rewards, batch.values)), strict=True
    )
    advantages, returns = [], []
    for mask, rewards, values in rows:
        steps = [step for step, mine in enumerate(mask) if mine]
        later = [values[step] for step in steps[1:]] + [0.0] * bool(steps)
        residuals = [rewards[step] + gamma * after - values[step] for step, after in zip(steps, later, strict=True)]
        found = [0.0 for _ in mask]
        for first, step in enumerate(steps):
            found[step] = sum((gamma * lam) ** distance * r for distance, r in enumerate(residuals[first:]))
        advantages.append(found)
        returns.append([a + v if mine else 0.0 for a, v, mine in zip(found, values, mask, strict=True)])
    return whitened(batch, advantages), returns


def test_residuals_are_summed_backwards_and_whitened(make_batch):
    # gamma 0.5, lam 0.5. Row 1: residuals 0 + 0.5 * 2 - 1 = 0 and 4 - 2 = 2, so 0 + 0.25 * 2 = 0.5 and 2.
    # Row 2: residual 1 - 2 = -1. Mean of 0.5, 2, -1: 0.5; sample deviation 1.5.
    batch = make_batch([2, 1], token_rewards=[0.0, 4.0, 1.0], values=[1.0, 2.0, 2.0])
    advantages, returns = gae(batch, gamma=0.5, lam=0.5)
    assert advantages.tolist() == pytest.approx([0, 1, -1], abs=1e-6)
    assert returns.tolist() == [1.5, 4, 1]


def test_the_value_of_the_next_written_token_follows_one_before_a_tools_answer(make_batch):
    # Residuals 0 + 3 - 1 = 2 and 5 - 3 = 2; the tool's value 100 and reward 100 play no part.
    batch = make_batch(
        [3], token_rewards=[0.0, 100.0, 5.0], values=[1.0, 100.0, 3.0], response_mask=[True, False, True]
    )
    _, returns = gae(batch, gamma=1.0, lam=0.0)
    assert returns.tolist() == [3, 0, 5]


def test_with_gamma_and_lambda_1_returns_are_the_rewards_to_come(make_batch):
    batch = make_batch([3, 2], token_rewards=[1.0, 0.0, 2.0, 0.5, 0.25], values=[0.3, -0.7, 5.0, 0.1, 0.9])
    _, returns = gae(batch, gamma=1.0, lam=1.0)
    assert returns.tolist() == pytest.approx([3, 2, 2, 0.75, 0.25], abs=1e-6)


@given(SEEDS, FACTORS, FACTORS)
def test_it_agrees_with_a_double_precision_reference(make_batch, seed, gamma, lam):
    batch = drawn(make_batch, seed)
    found = gae(batch, gamma=gamma, lam=lam)
    for ours, expected in zip(found, reference(batch, gamma, lam), strict=True):
        assert ours.tolist() == pytest.approx(flat(expected), rel=1e-6, abs=1e-6)


def test_a_row_of_thousands_of_tokens_agrees_with_it_too(make_batch):
    draw = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 2053, generator=draw)
    batch = make_batch([2000, 53], token_rewards=rewards, values=values, response_mask=values < 1)
    for ours, expected in zip(gae(batch, gamma=1.0, lam=0.95), reference(batch, gamma=1.0, lam=0.95), strict=True):
        assert ours.tolist() == pytest.approx(flat(expected), rel=1e-6, abs=3e-6)

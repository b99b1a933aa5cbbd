import math

import pytest

from hybridrl.core.algorithms.policy_losses import geo_mean

SETTINGS = dict(clip_ratio_low=0.2, clip_ratio_high=0.4)


def run(one_row, changes, advantages, **fields):
    """One row whose log-probs moved by these."""
    cases = [(0.1, 0.1 * math.exp(change), advantage) for change, advantage in zip(changes, advantages, strict=True)]
    return one_row(geo_mean, cases, SETTINGS, **fields)


def test_a_good_row_is_clipped_above_token_by_token(one_row):
    # (0.4 - 0.6) / 2 = -0.1. Of two tokens that carry the row's loss, the clipped one has no gradient.
    loss, statistics, gradient = run(one_row, [0.5, -0.6], [1.0, 1.0])
    assert loss == pytest.approx([-math.exp(-0.1)] * 2)
    assert gradient == pytest.approx([0, -math.exp(-0.1)])
    assert (statistics["pg_clipfrac"], statistics["pg_clipfrac_lower"]) == ([1, 1], [0, 0])
    assert statistics["ppo_kl"] == pytest.approx([-0.5, 0.6])


def test_a_bad_row_is_clipped_below(one_row):
    # (0.6 - 0.2) / 2 = 0.2.
    loss, statistics, gradient = run(one_row, [0.6, -0.3], [-2.0, -2.0])
    assert loss == pytest.approx([2 * math.exp(0.2)] * 2)
    assert gradient == pytest.approx([2 * math.exp(0.2), 0])
    assert (statistics["pg_clipfrac"], statistics["pg_clipfrac_lower"]) == ([0, 0], [1, 1])


def test_only_written_tokens_make_the_mean(one_row):
    loss, _, gradient = run(one_row, [0.3, 0.1, 0.2], [1.0, 3.0, 3.0], response_mask=[True, False, True])
    assert loss[0] == pytest.approx(-2 * math.exp(0.25))
    assert gradient[1] == 0


def test_a_token_without_an_advantage_leaves_the_ratio_alone(one_row):
    loss, _, gradient = run(one_row, [0.3, 0.1], [1.0, 0.0])
    assert loss == pytest.approx([-0.5 * math.exp(0.15)] * 2)
    assert gradient == pytest.approx([-0.5 * math.exp(0.15), 0])

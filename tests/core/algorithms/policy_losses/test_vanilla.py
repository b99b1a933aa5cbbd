import pytest

from hybridrl.core.algorithms.policy_losses import vanilla

SETTINGS = dict(clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=3.0)


def run(one_row, cases):
    """Tokens of these (ratio, advantage)."""
    return one_row(vanilla, [(0.1, 0.1 * ratio, advantage) for ratio, advantage in cases], SETTINGS)


def test_the_ratio_is_clipped_on_the_side_where_it_would_gain(one_row):
    # Gained enough above; fell below, to be raised; fell enough; rose, to be lowered; in the window.
    cases = [(1.5, 1.0), (0.5, 1.0), (0.5, -1.0), (1.5, -1.0), (1.1, 2.0)]
    loss, statistics, gradient = run(one_row, cases)
    assert loss == pytest.approx([-1.3, -0.5, 0.8, 1.5, -2.2])
    assert statistics["pg_clipfrac"] == [1, 0, 1, 0, 0]
    assert gradient == pytest.approx([0, -0.5, 0, 1.5, -2.2])


def test_the_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely(one_row):
    loss, statistics, gradient = run(one_row, [(5.0, -1.0), (2.9, -1.0), (5.0, 1.0), (5.0, -0.5)])
    assert loss == pytest.approx([3.0, 2.9, -1.3, 1.5])
    assert statistics["pg_clipfrac_lower"] == [1, 0, 0, 1]
    assert gradient == pytest.approx([0, 2.9, 0, 0])

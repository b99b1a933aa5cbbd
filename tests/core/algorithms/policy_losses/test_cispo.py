import math

import pytest

from hybridrl.core.algorithms.policy_losses import cispo

SETTINGS = dict(clip_ratio_low=0.2, clip_ratio_high=0.3)


def test_every_token_keeps_a_gradient_weighted_by_the_clipped_ratio(one_row):
    cases = [(0.2, 0.3, 1.0), (0.2, 0.1, 1.0), (0.2, 0.1, -1.0), (0.2, 0.22, 2.0)]
    loss, statistics, gradient = one_row(cispo, cases, SETTINGS)
    assert gradient == pytest.approx([-1.3, -0.8, 0.8, -2.2])
    assert loss[:2] == pytest.approx([-1.3 * math.log(0.3), -0.8 * math.log(0.1)])
    assert statistics["pg_clipfrac"] == [1, 1, 1, 0]

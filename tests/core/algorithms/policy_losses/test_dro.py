import math

import pytest

from hybridrl.core.algorithms.policy_losses import dro


def test_a_log_prob_that_moved_pays_half_its_square_times_the_weight(one_row):
    # Log-ratios ln 2 and -ln 2; slopes -A + weight * log-ratio.
    found, statistics, gradient = one_row(dro, [(0.2, 0.4, 2.0), (0.4, 0.2, -1.0)], dict(dro_beta=0.5))
    penalty = 0.25 * math.log(2) ** 2
    assert found == pytest.approx([-2 * math.log(0.4) + penalty, math.log(0.2) + penalty])
    assert gradient == pytest.approx([-2 + 0.5 * math.log(2), 1 - 0.5 * math.log(2)])
    assert statistics["ppo_kl"] == pytest.approx([-math.log(2), math.log(2)])

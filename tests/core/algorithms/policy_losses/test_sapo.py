import math

import pytest

from hybridrl.core.algorithms.policy_losses import sapo

SETTINGS = dict(tau_pos=1.0, tau_neg=2.0)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_each_sign_of_the_advantage_has_its_temperature(one_row):
    loss, _, gradient = one_row(sapo, [(0.2, 0.4, 1.0), (0.2, 0.4, -1.0)], SETTINGS)
    assert loss == pytest.approx([-4 * sigmoid(1), 2 * sigmoid(2)])
    # Slope 4 g (1 - g) r: a bad token that became likely is left sooner.
    assert gradient == pytest.approx([-8 * sigmoid(1) * sigmoid(-1), 8 * sigmoid(2) * sigmoid(-2)])


def test_where_the_ratio_is_one_the_loss_is_twice_the_advantage_over_the_temperature(one_row):
    loss, _, gradient = one_row(sapo, [(0.2, 0.2, 1.0), (0.2, 0.2, -1.0)], SETTINGS)
    assert loss == pytest.approx([-2.0, 1.0])
    assert gradient == pytest.approx([-1.0, 1.0])


def test_nothing_is_clipped_that_could_be_counted(one_row):
    assert set(one_row(sapo, [(0.2, 0.4, 1.0)], SETTINGS)[1]) == {"ppo_kl"}

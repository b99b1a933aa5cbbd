import math

import pytest
import torch

from hybridrl.core.algorithms.policy_losses import gpg, likelihood, reinforce


@pytest.mark.parametrize("loss", [gpg, reinforce])
def test_the_log_prob_is_weighted_by_the_advantage_however_far_the_policy_moved(one_row, loss):
    found, _, gradient = one_row(loss, [(0.2, 0.4, 2.0), (0.9, 0.1, -0.5)], {})
    assert found == pytest.approx([-2 * math.log(0.4), 0.5 * math.log(0.1)])
    assert gradient == [-2.0, 0.5]


def test_group_policy_gradient_needs_no_old_log_probs(make_batch):
    loss, statistics = gpg(torch.tensor([-0.5]), make_batch([1], advantages=[2.0]))
    assert (loss.tolist(), statistics) == ([1.0], {})


def test_the_likelihood_loss_is_the_negative_log_prob_and_needs_no_advantages(make_batch):
    loss, statistics = likelihood(torch.tensor([-0.5, -2.0]), make_batch([2]))
    assert (loss.tolist(), statistics) == ([0.5, 2.0], {})

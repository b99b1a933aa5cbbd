import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.core.algorithms.policy_losses import gspo

SETTINGS = dict(clip_ratio_low=0.2, clip_ratio_high=0.3)


def test_a_row_has_one_ratio_the_geometric_mean_of_its_tokens(one_row):
    # Ratios 2 and 0.6: their geometric mean is the root of 1.2, within the window, though neither token's is.
    loss, statistics, gradient = one_row(gspo, [(0.2, 0.4, 1.0), (0.5, 0.3, 1.0)], SETTINGS)
    assert loss == gradient == pytest.approx([-math.sqrt(1.2)] * 2)
    assert statistics["pg_clipfrac"] == [0, 0]
    assert statistics["ppo_kl"] == pytest.approx([-math.log(2), -math.log(0.6)])


def test_a_row_beyond_the_window_is_clipped_whole(one_row):
    loss, statistics, gradient = one_row(gspo, [(0.2, 0.4, 1.0), (0.5, 0.5, 1.0)], SETTINGS)
    assert loss == pytest.approx([-1.3, -1.3])
    assert (gradient, statistics["pg_clipfrac"]) == ([0, 0], [1, 1])


def test_the_ratio_is_that_of_written_tokens(one_row):
    loss, _, _ = one_row(gspo, [(0.2, 0.4, -1.0), (0.5, 0.01, -1.0)], SETTINGS, response_mask=[True, False])
    assert loss[0] == pytest.approx(2.0)


def test_the_log_of_the_ratio_is_at_most_ten(one_row):
    loss, _, gradient = one_row(gspo, [(1e-6, 0.9, -1.0)], SETTINGS)
    assert loss == pytest.approx([math.exp(10)])
    assert gradient == [0]


@given(seed=st.integers(0, 10_000))
def test_with_one_advantage_a_row_it_is_the_papers_sequence_loss_in_value_and_gradient(ragged, total, seed):
    log_probs, batch = ragged(seed, one_advantage_a_row=True)
    log_probs.requires_grad_()
    ratio = batch.trained_mean(log_probs - batch.old_log_probs).exp()
    advantage = batch.trained_mean(batch.advantages)
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)
    written = batch.per_row(batch.response_mask.long()) > 0
    paper = -surrogate[written].mean()
    loss = total("gspo", log_probs, batch, SETTINGS)
    assert loss.item() == pytest.approx(paper.item(), abs=1e-7)
    found, expected = (torch.autograd.grad(value, log_probs)[0].tolist() for value in (loss, paper))
    assert found == pytest.approx(expected, abs=1e-7)

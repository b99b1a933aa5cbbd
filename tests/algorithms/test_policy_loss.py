import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.algorithms import Clip
from hybridrl.algorithms.policy_loss import likelihood, vanilla

CLIP = Clip(low=0.2, high=0.3, dual=3.0)


def run(make_batch, cases, clip=CLIP):
    """The loss of one row whose tokens have these (ratio, advantage), its statistics and its gradient."""
    ratios, advantages = torch.tensor(cases).T
    batch = make_batch([len(cases)], old_log_probs=torch.full_like(ratios, -1.0), advantages=advantages)
    log_probs = (ratios.log() - 1).requires_grad_()
    loss, statistics = vanilla(log_probs, batch, clip)
    loss.sum().backward()
    return loss, statistics, log_probs.grad


def test_the_ratio_is_clipped_on_the_side_where_it_would_gain(make_batch):
    # (ratio, advantage): gained enough above; fell below, to be raised; fell enough; rose, to be lowered; in the window
    cases = [(1.5, 1.0), (0.5, 1.0), (0.5, -1.0), (1.5, -1.0), (1.1, 2.0)]
    loss, statistics, gradient = run(make_batch, cases)
    assert loss.tolist() == pytest.approx([-1.3, -0.5, 0.8, 1.5, -2.2])
    assert statistics["pg_clipfrac"].tolist() == [1, 0, 1, 0, 0]
    assert gradient.tolist() == pytest.approx([0, -0.5, 0, 1.5, -2.2])


def test_the_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely(make_batch):
    loss, statistics, gradient = run(make_batch, [(5.0, -1.0), (2.9, -1.0), (5.0, 1.0), (5.0, -0.5)])
    assert loss.tolist() == pytest.approx([3.0, 2.9, -1.3, 1.5])
    assert statistics["pg_clipfrac_lower"].tolist() == [1, 0, 0, 1]
    assert gradient.tolist() == pytest.approx([0, 2.9, 0, 0])


def test_ppo_kl_is_the_fall_of_the_log_prob(make_batch):
    _, statistics, _ = run(make_batch, [(1.5, 1.0), (0.5, 0.0)])
    assert statistics["ppo_kl"].tolist() == pytest.approx([-np.log(1.5), -np.log(0.5)])


def test_statistics_carry_no_gradient(make_batch):
    _, statistics, _ = run(make_batch, [(1.5, 1.0), (5.0, -1.0)])
    assert set(statistics) == {"pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"}
    assert not any(value.requires_grad for value in statistics.values())


def test_before_the_first_update_the_gradient_is_that_of_the_policy_gradient(make_batch):
    loss, statistics, gradient = run(make_batch, [(1.0, 2.0), (1.0, -0.5)])
    assert loss.tolist() == gradient.tolist() == [-2.0, 0.5]
    assert statistics["pg_clipfrac"].tolist() == [0, 0]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_prob", [-1000.0, 1000.0])
def test_a_ratio_out_of_range_stays_finite(make_batch, log_prob, advantage):
    batch = make_batch([1], old_log_probs=[0.0], advantages=[advantage])
    log_probs = torch.tensor([log_prob], requires_grad=True)
    loss, _ = vanilla(log_probs, batch, CLIP)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(log_probs.grad).all()


@given(st.lists(st.tuples(st.floats(0.01, 20), st.floats(-3, 3)), min_size=1, max_size=20))
def test_it_agrees_with_a_double_precision_reference(make_batch, cases):
    ratio, advantage = np.array(cases).T
    surrogate = np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.3) * advantage)
    expected = -np.where(advantage < 0, np.maximum(surrogate, 3.0 * advantage), surrogate)
    loss, _, _ = run(make_batch, [(float(r), float(a)) for r, a in cases])
    assert loss.tolist() == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-5)


def test_the_likelihood_loss_is_the_negative_log_prob_and_needs_no_advantages(make_batch):
    loss, statistics = likelihood(torch.tensor([-0.5, -2.0]), make_batch([2]), CLIP)
    assert (loss.tolist(), statistics) == ([0.5, 2.0], {})

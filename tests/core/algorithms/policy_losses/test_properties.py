"""Properties of every loss, with the exceptions named."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.config.catalog import POLICY_LOSSES
from hybridrl.core.algorithms.objective import Totals, token_weights
from tests.core.algorithms.parameters import policy_loss

SETTINGS = dict(clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=1.5)
SEEDS = st.integers(0, 10_000)
few = settings(max_examples=15)  # of rows that are many cases each
NAMES = [name for name in POLICY_LOSSES if name != "gmpo"]
LEARNING_FROM_REWARDS = [name for name in NAMES if name != "likelihood"]
PENALISING = ("kl_cov", "dro")  # a term of theirs knows no advantage
# Of the others the gradient is not that of the value: a factor counts as a constant.
DIFFERENTIABLE = ["vanilla", "sapo", "geo_mean", "gpg", "clip_cov", "kl_cov", "dro", "reinforce", "likelihood"]
# Functions of the ratio alone, or with a gradient that is one.
OF_THE_RATIO = ["vanilla", "gspo", "cispo", "sapo", "geo_mean", "gpg", "clip_cov", "kl_cov", "reinforce"]


def gradient_of(total, name, log_probs, batch, totals=None):
    log_probs = log_probs.clone().requires_grad_()
    loss = total(name, log_probs, batch, SETTINGS, totals)
    return loss.item(), torch.autograd.grad(loss, log_probs)[0]


@pytest.mark.parametrize("name", LEARNING_FROM_REWARDS)
@few
@given(seed=SEEDS)
def test_before_the_first_update_the_gradient_is_the_policy_gradient(ragged, total, name, seed):
    _, batch = ragged(seed, one_advantage_a_row=True)
    _, gradient = gradient_of(total, name, batch.old_log_probs, batch)
    expected = -batch.advantages * token_weights(
        batch, POLICY_LOSSES[name].aggregation or "token-mean", Totals.of(batch)
    )
    if name == "clip_cov":  # of all losses the only one that leaves tokens out from the start
        expected = expected * ~batch.chosen
    assert gradient.tolist() == pytest.approx(expected.tolist(), abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
@few
@given(seed=SEEDS)
def test_tokens_that_the_policy_did_not_write_change_nothing(ragged, total, name, seed):
    log_probs, batch = ragged(seed)
    written = batch.response_mask
    other = replace(
        batch,
        old_log_probs=torch.where(written, batch.old_log_probs, -7.0),
        advantages=torch.where(written, batch.advantages, 5.0),
    )
    before = gradient_of(total, name, log_probs, batch)
    after = gradient_of(total, name, torch.where(written, log_probs, -0.5), other)
    assert before[0] == pytest.approx(after[0])
    assert before[1].tolist() == pytest.approx(after[1].tolist())


@pytest.mark.parametrize("name", NAMES)
@few
@given(seed=SEEDS, order=st.permutations(range(6)), cut=st.integers(1, 5))
def test_passes_of_rows_in_any_order_add_up_to_the_mini_batch(ragged, total, name, seed, order, cut):
    log_probs, batch = ragged(seed)
    whole, gradient = gradient_of(total, name, log_probs, batch)
    carried = replace(batch, values=log_probs, returns=gradient)
    parts = [carried.select(order[:cut]), carried.select(order[cut:])]
    shares = [gradient_of(total, name, part.values, part, Totals.of(batch)) for part in parts]
    assert sum(loss for loss, _ in shares) == pytest.approx(whole)
    for part, (_, found) in zip(parts, shares, strict=True):
        assert found.tolist() == pytest.approx(part.returns.tolist())


@pytest.mark.parametrize("name", [name for name in LEARNING_FROM_REWARDS if name not in PENALISING])
@few
@given(seed=SEEDS, factor=st.floats(0.01, 100))
def test_the_loss_scales_with_the_advantages(ragged, total, name, seed, factor):
    log_probs, batch = ragged(seed)
    scaled = replace(batch, advantages=factor * batch.advantages)
    loss, gradient = gradient_of(total, name, log_probs, batch)
    loss_scaled, gradient_scaled = gradient_of(total, name, log_probs, scaled)
    assert loss_scaled == pytest.approx(factor * loss)
    assert gradient_scaled.tolist() == pytest.approx((factor * gradient).tolist())


@pytest.mark.parametrize("name", OF_THE_RATIO)
@few
@given(seed=SEEDS, shift=st.floats(-2, 2))
def test_only_the_ratio_steers_the_gradient(ragged, total, name, seed, shift):
    log_probs, batch = ragged(seed)
    shifted = replace(batch, old_log_probs=batch.old_log_probs + shift)
    _, gradient = gradient_of(total, name, log_probs, batch)
    _, gradient_shifted = gradient_of(total, name, log_probs + shift, shifted)
    assert gradient_shifted.tolist() == pytest.approx(gradient.tolist())


@pytest.mark.parametrize("name", [name for name in LEARNING_FROM_REWARDS if name not in PENALISING])
@few
@given(seed=SEEDS)
def test_without_advantages_nothing_moves(ragged, total, name, seed):
    log_probs, batch = ragged(seed)
    loss, gradient = gradient_of(total, name, log_probs, replace(batch, advantages=0 * batch.advantages))
    assert loss == 0 and not gradient.any()


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@few
@given(seed=SEEDS)
def test_the_gradient_is_the_finite_difference(ragged, total, name, seed):
    log_probs, batch = ragged(seed)
    assert torch.autograd.gradcheck(lambda values: total(name, values, batch, SETTINGS), log_probs.requires_grad_())


@pytest.mark.parametrize("name", NAMES)
def test_statistics_are_one_a_token_and_carry_no_gradient(ragged, name):
    log_probs, batch = ragged(0)
    log_probs.requires_grad_()
    loss, statistics = policy_loss(name, **SETTINGS)(log_probs, batch)
    assert loss.requires_grad and loss.shape == log_probs.shape
    assert set(statistics) <= {"pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"}
    for value in statistics.values():
        assert value.shape == log_probs.shape and value.is_floating_point() and not value.requires_grad


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("gpg", "likelihood", "kl_cov")])
def test_ppo_kl_is_the_fall_of_the_log_prob(ragged, name):
    log_probs, batch = ragged(0)
    _, statistics = policy_loss(name, **SETTINGS)(log_probs, batch)
    assert statistics["ppo_kl"].tolist() == pytest.approx((batch.old_log_probs - log_probs).tolist())


@pytest.mark.parametrize("name", ["vanilla", "cispo", "sapo", "dppo_tv", "dppo_kl"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("change", [-1000.0, 1000.0])
def test_the_log_ratio_is_at_most_twenty_either_way(make_batch, name, change, advantage):
    batch = make_batch([1], old_log_probs=[0.0], advantages=[advantage])
    log_probs = torch.tensor([change], requires_grad=True)
    loss, statistics = policy_loss(name, **SETTINGS)(log_probs, batch)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(log_probs.grad).all()
    assert statistics["ppo_kl"].item() == -math.copysign(20, change)


def gradient_of_the_first(ragged, total, name, seed, move_others):
    log_probs, batch = ragged(seed)
    log_probs[1:] -= move_others
    return gradient_of(total, name, log_probs, batch)[1][0]


@pytest.mark.parametrize("name", [name for name in NAMES if POLICY_LOSSES[name].by_token])
@few
@given(seed=SEEDS, move=st.floats(0, 5))
def test_by_token_the_gradient_depends_on_no_other_tokens_log_prob(ragged, total, name, seed, move):
    alone, with_others = (gradient_of_the_first(ragged, total, name, seed, by) for by in (0, move))
    assert torch.equal(alone, with_others)


@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES if not POLICY_LOSSES[name].by_token])
def test_in_other_losses_it_does(ragged, total, name):
    moved = [gradient_of_the_first(ragged, total, name, seed, 0.05) for seed in range(20)]
    assert moved != [gradient_of_the_first(ragged, total, name, seed, 0) for seed in range(20)]

"""Clip-Cov and KL-Cov: which tokens they choose, and what becomes of those."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.core.algorithms.policy_losses import (
    clip_cov,
    covariance,
    kl_cov,
    select_clipped,
    select_penalized,
)
from tests.core.algorithms.parameters import policy_loss

SETTINGS = dict(clip_ratio_low=0.2, clip_ratio_high=0.3, ppo_kl_coef=0.5)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def six_tokens(make_batch):
    """Over the four written tokens the advantages' mean is 0, the log-probs' -2; their covariances are 2, 1, 4, 3."""
    return make_batch(
        [3, 3],
        advantages=[2.0, -1.0, 50.0, -4.0, 50.0, 3.0],
        old_log_probs=[-1.0, -3.0, -0.1, -3.0, -0.1, -1.0],
        response_mask=[True, True, False, True, False, True],
    )


def test_the_covariance_is_around_the_means_of_written_tokens(six_tokens):
    assert covariance(six_tokens).tolist() == pytest.approx([2, 1, -math.inf, 4, -math.inf, 3])


@given(seed=st.integers(0, 10_000))
def test_the_covariances_are_those_of_the_formula_on_ragged_rows(ragged, seed):
    _, batch = ragged(seed)
    fields = (batch.advantages, batch.old_log_probs, batch.response_mask)
    written = [values[:2] for values in zip(*(field.tolist() for field in fields), strict=True) if values[2]]
    means = [sum(values) / len(written) for values in zip(*written, strict=True)]
    expected = [(advantage - means[0]) * (log_prob - means[1]) for advantage, log_prob in written]
    assert covariance(batch)[batch.response_mask].tolist() == pytest.approx(expected, abs=1e-9)


# -- the tokens chosen ----------------------------------------------------------------------------------------------


def test_clip_cov_draws_its_share_from_the_tokens_strictly_between_the_bounds(six_tokens):
    settings = dict(clip_cov_ratio=1.0, clip_cov_lb=1.0, clip_cov_ub=4.0)
    assert policy_loss(select_clipped, **settings)(six_tokens, seeded()).tolist() == [
        True,
        False,
        False,
        False,
        False,
        True,
    ]


def test_clip_cov_draws_no_more_than_its_share_and_any_candidate_may_be_drawn(six_tokens):
    settings = dict(clip_cov_ratio=0.5, clip_cov_lb=0.0, clip_cov_ub=4.5)
    draws = [policy_loss(select_clipped, **settings)(six_tokens, seeded(seed)) for seed in range(30)]
    assert {int(draw.sum()) for draw in draws} == {2}
    assert torch.stack(draws).any(0).tolist() == six_tokens.response_mask.tolist()


def test_the_same_generator_draws_the_same(six_tokens):
    settings = dict(clip_cov_ratio=0.3, clip_cov_lb=0.0)
    assert torch.equal(*(policy_loss(select_clipped, **settings)(six_tokens, seeded(7)) for _ in range(2)))


def test_without_a_candidate_clip_cov_chooses_none(six_tokens):
    settings = dict(clip_cov_ratio=0.5, clip_cov_lb=5.0, clip_cov_ub=9.0)
    assert not policy_loss(select_clipped, **settings)(six_tokens, seeded()).any()


@pytest.mark.parametrize(("share", "chosen"), [(0.5, [3, 5]), (0.74, [3, 5]), (0.75, [0, 3, 5]), (1.0, [0, 1, 3, 5])])
def test_kl_cov_takes_the_share_with_the_highest_covariance(six_tokens, share, chosen):
    settings = dict(kl_cov_ratio=share)
    assert policy_loss(select_penalized, **settings)(six_tokens, seeded()).nonzero().squeeze(1).tolist() == chosen


@pytest.mark.parametrize("selector", [select_clipped, select_penalized])
def test_of_a_share_below_one_token_one_is_chosen(six_tokens, selector):
    assert policy_loss(selector)(six_tokens, seeded()).sum() == 1


@pytest.mark.parametrize("selector", [select_clipped, select_penalized])
def test_where_nothing_was_written_none_is_chosen(six_tokens, selector):
    unwritten = replace(six_tokens, response_mask=torch.zeros(6, dtype=torch.bool))
    assert policy_loss(selector)(unwritten, seeded()).tolist() == [False] * 6


@given(seed=st.integers(0, 10_000), order=st.permutations(range(6)), shift=st.floats(-5, 5))
def test_the_highest_covariances_stay_the_highest_in_another_order_and_with_another_baseline(
    ragged, seed, order, shift
):
    _, batch = ragged(seed)
    settings = dict(kl_cov_ratio=0.3)
    chosen = policy_loss(select_penalized, **settings)(batch, seeded())
    other = replace(batch, chosen=chosen, advantages=batch.advantages + shift).select(order)
    selected, values = policy_loss(select_penalized, **settings)(other, seeded()), covariance(other)
    # Tokens of equal covariance are interchangeable.
    torch.testing.assert_close(values[selected].sort().values, values[other.chosen].sort().values)


# -- what becomes of them -------------------------------------------------------------------------------------------


def test_clip_cov_takes_the_gradient_from_the_chosen_and_clips_the_others(one_row):
    cases = [(0.2, 0.22, 1.0), (0.2, 0.22, 1.0), (0.2, 0.3, 1.0), (0.02, 0.2, -1.0)]
    loss, statistics, gradient = one_row(clip_cov, cases, SETTINGS, chosen=[True, False, False, False])
    assert loss == pytest.approx([0, -1.1, -1.3, 10])
    assert gradient == pytest.approx([0, -1.1, 0, 10])
    assert statistics["pg_clipfrac"] == [1, 0, 0, 0]


def test_kl_cov_lets_the_chosen_pay_for_moving_either_way_and_clips_nothing(one_row):
    cases = [(0.2, 0.3, 1.0), (0.2, 0.3, 1.0), (0.2, 0.1, 1.0)]
    loss, statistics, gradient = one_row(kl_cov, cases, SETTINGS, chosen=[False, True, True])
    assert loss == pytest.approx([-1.5, -1.5 + 0.5 * math.log(1.5), -0.5 + 0.5 * math.log(2)])
    assert gradient == pytest.approx([-1.5, -1.0, -1.0])
    assert statistics["ppo_kl"] == pytest.approx([math.log(1.5), math.log(1.5), math.log(2)])
    assert set(statistics) == {"ppo_kl"}

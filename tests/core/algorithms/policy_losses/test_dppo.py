import math

import pytest
import torch

from hybridrl.core.algorithms.policy_losses import dppo_kl, dppo_tv
from tests.core.algorithms.parameters import policy_loss


def test_total_variation_masks_what_moved_too_far_along_its_advantage(one_row):
    # To be raised: far, near, far the wrong way. To be lowered: the same.
    cases = [(0.5, 0.7, 1.0), (0.5, 0.6, 1.0), (0.5, 0.3, 1.0), (0.5, 0.3, -1.0), (0.5, 0.45, -1.0), (0.5, 0.7, -1.0)]
    settings = dict(clip_ratio_low=0.1, clip_ratio_high=0.15)
    loss, statistics, gradient = one_row(dppo_tv, cases, settings)
    assert gradient == pytest.approx([0, -1.2, -0.6, 0, 0.9, 1.4])
    assert loss[1] == pytest.approx(-1.2 * math.log(0.6))
    assert statistics["pg_clipfrac"] == [1, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("loss", [dppo_tv, dppo_kl])
def test_an_unlikely_token_may_grow_many_times_but_its_weight_is_bounded(one_row, loss):
    settings = dict(clip_ratio_low=0.05, clip_ratio_high=0.05, clip_ratio_c=3.0)
    _, statistics, gradient = one_row(loss, [(0.001, 0.01, 1.0), (0.001, 0.002, 1.0)], settings)
    assert gradient == pytest.approx([-3, -2])
    assert (statistics["pg_clipfrac"], statistics["pg_clipfrac_lower"]) == ([0, 0], [1, 0])


def test_a_masked_token_is_not_counted_as_bounded_too(one_row):
    settings = dict(clip_ratio_low=0.05, clip_ratio_high=0.05, clip_ratio_c=3.0)
    _, statistics, _ = one_row(dppo_tv, [(0.1, 0.5, 1.0)], settings)
    assert (statistics["pg_clipfrac"], statistics["pg_clipfrac_lower"]) == ([1], [0])


@pytest.mark.parametrize(("threshold", "masked"), [(0.087, 1), (0.088, 0)])
@pytest.mark.parametrize(("now", "advantage"), [(0.7, 1.0), (0.3, -1.0)])
def test_the_divergence_is_that_of_the_token_against_all_others(one_row, threshold, masked, now, advantage):
    # 0.5 ln(0.5 / 0.7) + 0.5 ln(0.5 / 0.3) = 0.0872, and the same mirrored.
    settings = dict(clip_ratio_low=threshold, clip_ratio_high=threshold)
    _, statistics, _ = one_row(dppo_kl, [(0.5, now, advantage)], settings)
    assert statistics["pg_clipfrac"] == [masked]


def test_each_direction_has_its_threshold(one_row):
    cases = [(0.5, 0.7, 1.0), (0.5, 0.3, -1.0)]
    raised = dict(clip_ratio_low=0.01, clip_ratio_high=0.5)
    lowered = dict(clip_ratio_low=0.5, clip_ratio_high=0.01)
    for loss in (dppo_tv, dppo_kl):
        assert one_row(loss, cases, raised)[1]["pg_clipfrac"] == [0, 1]
        assert one_row(loss, cases, lowered)[1]["pg_clipfrac"] == [1, 0]


def test_what_moved_against_its_advantage_is_never_masked(one_row):
    settings = dict(clip_ratio_low=0.0, clip_ratio_high=0.0)
    for loss in (dppo_tv, dppo_kl):
        assert one_row(loss, [(0.5, 0.1, 1.0), (0.5, 0.9, -1.0)], settings)[1]["pg_clipfrac"] == [0, 0]


def test_a_probability_that_rounding_lifts_above_one_still_has_a_divergence(make_batch):
    # A token that was sure and stays so has not moved, whichever side of 1 it is rounded to.
    batch = make_batch([1], old_log_probs=[0.0], advantages=[1.0])
    loss, statistics = policy_loss(dppo_kl, clip_ratio_high=0.01)(torch.tensor([2e-7]), batch)
    assert statistics["pg_clipfrac"].tolist() == [0] and torch.isfinite(loss).all()

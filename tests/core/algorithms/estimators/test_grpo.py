import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.core.algorithms.estimators import grpo
from tests.core.algorithms.estimators.rows import (
    SEEDS,
    drawn,
    flat,
    group_mates,
    on_last_token,
    on_tokens,
    one_group,
    scores,
)

GRPO, DR_GRPO = {"norm_adv_by_std_in_grpo": True}, {"norm_adv_by_std_in_grpo": False}
SCORES = st.lists(st.integers(0, 10).map(float), min_size=2, max_size=8)


def advantages_by_row(batch):
    return grpo(batch, **GRPO)[0][batch.last_tokens]


def reference(batch, normalise):
    """The same by the book, a row at a time; a group of one has no advantage."""
    found, all_scores = [], scores(batch)
    for row, score in enumerate(all_scores):
        group = [all_scores[mate] for mate in group_mates(batch, row)]
        deviation = np.std(group, ddof=1) + 1e-6 if normalise and len(group) > 1 else 1.0
        found.append((score - np.mean(group)) / deviation)
    return on_tokens(batch, found)


@pytest.fixture(scope="module")
def ragged(make_batch):
    """Groups of 3, 2 and 1 rows that do not lie together; scores 1, 0, 0.5 and 3, 1 and 4."""
    answers, found = [2, 1, 3, 1, 2, 1], [1.0, 3.0, 0.0, 4.0, 0.5, 1.0]
    return make_batch(answers, group=[7, 3, 7, 5, 7, 3], token_rewards=on_last_token(answers, found))


def test_every_token_has_its_rows_distance_from_the_group_mean_in_deviations(ragged):
    # Group 7: mean 0.5, deviation sqrt(0.5 / 2) = 0.5. Group 3: mean 2, deviation sqrt(2 / 1). Group 5 is alone.
    advantages, returns = grpo(ragged, **GRPO)
    assert advantages.tolist() == pytest.approx([1, 1, 0.70711, -1, -1, -1, 0, 0, 0, -0.70711], abs=1e-5)
    assert torch.equal(advantages, returns)


def test_dr_grpo_leaves_the_deviation_out(ragged):
    assert grpo(ragged, **DR_GRPO)[0].tolist() == pytest.approx([0.5, 0.5, 1, -0.5, -0.5, -0.5, 0, 0, 0, -1])


def test_the_score_of_a_row_is_the_sum_of_its_token_rewards(make_batch):
    batch = make_batch([2, 2], group=[0, 0], token_rewards=[0.5, 0.5, -1.0, 1.0])
    assert grpo(batch, **DR_GRPO)[0].tolist() == [0.5, 0.5, -0.5, -0.5]


def test_tokens_that_the_policy_did_not_write_have_no_advantage(make_batch):
    batch = make_batch(
        [3, 1], group=[0, 0], token_rewards=[0.0, 0.0, 2.0, 0.0], response_mask=[True, False, True, True]
    )
    assert grpo(batch, **DR_GRPO)[0].tolist() == [1, 0, 1, -1]


@given(st.floats(-1e6, 1e6, width=32), st.integers(2, 9))
def test_where_all_score_the_same_nobody_has_an_advantage(make_batch, score, count):
    assert not grpo(one_group(make_batch, [score] * count), **GRPO)[0].any()


@given(SEEDS, st.booleans())
def test_it_agrees_with_a_double_precision_reference(make_batch, seed, normalise):
    batch = drawn(make_batch, seed)
    found, _ = grpo(batch, norm_adv_by_std_in_grpo=normalise)
    assert found.tolist() == pytest.approx(flat(reference(batch, normalise)), rel=1e-6, abs=1e-6)


@given(SCORES, st.floats(0.5, 100))
def test_normalised_advantages_do_not_depend_on_the_scale_of_the_scores(make_batch, found, scale):
    scaled = advantages_by_row(one_group(make_batch, [score * scale for score in found]))
    assert scaled.tolist() == pytest.approx(advantages_by_row(one_group(make_batch, found)).tolist(), abs=1e-4)


@given(SCORES)
def test_the_advantages_of_a_group_sum_to_zero(make_batch, found):
    assert float(advantages_by_row(one_group(make_batch, found)).sum()) == pytest.approx(0, abs=1e-5)

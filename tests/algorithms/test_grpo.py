import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.algorithms.grpo import grpo

SCORES = st.lists(st.integers(0, 10).map(float), min_size=2, max_size=8)


def on_last_token(answers, scores):
    """Token rewards of rows whose whole score lies on the last token."""
    return torch.cat([torch.tensor([0.0] * (n - 1) + [s]) for n, s in zip(answers, scores, strict=True)])


def one_group(make_batch, scores):
    answers = [1 + row % 3 for row in range(len(scores))]
    return make_batch(answers, group=[0] * len(scores), token_rewards=on_last_token(answers, scores))


def advantages_by_row(batch, normalise=True):
    return grpo(batch, normalise)[0][batch.last_tokens]


def reference(scores, group, normalise):
    """The same by the book in double precision, a row at a time."""
    found = []
    for score, number in zip(scores, group, strict=True):
        others = [s for s, g in zip(scores, group, strict=True) if g == number]
        deviation = np.std(others, ddof=1) if len(others) > 1 else 0.0
        found.append((score - np.mean(others)) / (deviation + 1e-6 if normalise else 1.0))
    return found


@pytest.fixture(scope="module")
def ragged(make_batch):
    """Groups of 3, 2 and 1 rows that do not lie together; scores 1, 0, 0.5 and 3, 1 and 4."""
    answers, scores = [2, 1, 3, 1, 2, 1], [1.0, 3.0, 0.0, 4.0, 0.5, 1.0]
    return make_batch(answers, group=[7, 3, 7, 5, 7, 3], token_rewards=on_last_token(answers, scores))


def test_every_token_has_its_rows_distance_from_the_group_mean_in_deviations(ragged):
    # Group 7: mean 0.5, deviation sqrt(0.5 / 2) = 0.5. Group 3: mean 2, deviation sqrt(2 / 1). Group 5 is alone.
    advantages, returns = grpo(ragged)
    assert advantages.tolist() == pytest.approx([1, 1, 0.70711, -1, -1, -1, 0, 0, 0, -0.70711], abs=1e-5)
    assert torch.equal(advantages, returns)
    assert advantages.dtype == torch.float32


def test_dr_grpo_leaves_the_deviation_out(ragged):
    assert grpo(ragged, normalise=False)[0].tolist() == pytest.approx([0.5, 0.5, 1, -0.5, -0.5, -0.5, 0, 0, 0, -1])


def test_a_group_of_one_has_no_advantage(make_batch):
    batch = make_batch([2, 1], group=[0, 1], token_rewards=[0.0, 5.0, -3.0])
    assert grpo(batch)[0].tolist() == grpo(batch, normalise=False)[0].tolist() == [0, 0, 0]


def test_the_score_of_a_row_is_the_sum_of_its_token_rewards(make_batch):
    batch = make_batch([2, 2], group=[0, 0], token_rewards=[0.5, 0.5, -1.0, 1.0])
    assert grpo(batch, normalise=False)[0].tolist() == [0.5, 0.5, -0.5, -0.5]


def test_tokens_that_the_policy_did_not_write_have_no_advantage(make_batch):
    batch = make_batch(
        [3, 1], group=[0, 0], token_rewards=[0.0, 0.0, 2.0, 0.0], response_mask=[True, False, True, True]
    )
    assert grpo(batch, normalise=False)[0].tolist() == [1, 0, 1, -1]


@given(st.floats(-1e6, 1e6, width=32), st.integers(2, 9))
def test_where_all_score_the_same_nobody_has_an_advantage(make_batch, score, count):
    assert not grpo(one_group(make_batch, [score] * count))[0].any()


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3), st.floats(-5, 5)), min_size=1, max_size=10))
def test_it_agrees_with_a_double_precision_reference(make_batch, rows):
    answers, group, scores = zip(*rows, strict=True)
    scores = [round(score, 2) for score in scores]
    batch = make_batch(answers, group=group, token_rewards=on_last_token(answers, scores).double())
    for normalise in (True, False):
        expected = reference(scores, group, normalise)
        assert advantages_by_row(batch, normalise).tolist() == pytest.approx(expected, abs=1e-5)


@given(SCORES, st.floats(-100, 100, width=32))
def test_adding_the_same_to_every_score_changes_nothing(make_batch, scores, shift):
    shifted = advantages_by_row(one_group(make_batch, [score + shift for score in scores]))
    assert shifted.tolist() == pytest.approx(advantages_by_row(one_group(make_batch, scores)).tolist(), abs=1e-4)


@given(SCORES, st.floats(0.5, 100))
def test_normalised_advantages_do_not_depend_on_the_scale_of_the_scores(make_batch, scores, scale):
    scaled = advantages_by_row(one_group(make_batch, [score * scale for score in scores]))
    assert scaled.tolist() == pytest.approx(advantages_by_row(one_group(make_batch, scores)).tolist(), abs=1e-4)


@given(SCORES)
def test_the_advantages_of_a_group_sum_to_zero(make_batch, scores):
    assert float(advantages_by_row(one_group(make_batch, scores)).sum()) == pytest.approx(0, abs=1e-5)


@given(st.permutations(range(6)))
def test_the_order_of_the_rows_does_not_matter(ragged, order):
    expected = advantages_by_row(ragged)[list(order)]
    assert advantages_by_row(ragged.select(order)).tolist() == pytest.approx(expected.tolist())

"""Every estimator: numbers by hand, its reference in double precision, and what holds of all, or of all of a kind."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.config.catalog import ESTIMATORS
from hybridrl.core.algorithms.estimators import BLOCK, discounted_sums, whitened
from tests.core.algorithms import estimator_references as references
from tests.core.algorithms.estimator_references import drawn, flat
from tests.core.algorithms.parameters import estimator

SEEDS = st.integers(0, 2**32)
SETTINGS = {"gamma": 0.9, "lam": 0.8}
NAMES = [name for name in ESTIMATORS if not name.endswith("_vectorized")]
every_estimator = pytest.mark.parametrize("name", NAMES)
few = settings(max_examples=20)

# Those whose baseline comes from the row's group.
GROUPED = {"grpo", "grpo_passk", "rloo", "opo", "gpg", "gdpo", "reinforce_plus_plus_baseline"}
GROUPED |= {"optimal_token_baseline", "tir_optimal_token_baseline"}
BARE = {"norm_adv_by_std_in_grpo": False}
HALF = math.log(0.5)
MIXED = {  # groups of 3, 2 and 1 rows that are no neighbours; scores 1, 0, 0.5 and 3, 1 and 4
    "answers": [2, 1, 3, 1, 2, 1],
    "group": [7, 3, 7, 5, 7, 3],
    "token_rewards": [0.0, 1.0, 3.0, 0.0, 0.0, 0.0, 4.0, 0.0, 0.5, 1.0],
}
# Weights of the first row 0.5 and 1, of the second 1.5 and none: it wrote one token, after a tool's.
TOOL = {
    "answers": [2, 2],
    "group": [0, 0],
    "token_rewards": [0.0, 4.0, 7.0, 1.0],
    "response_mask": [True, True, False, True],
    "old_log_probs": [HALF, HALF, 0.0, HALF],
    "sum_pi_squared": [0.5, 0.5, 1.0, 1.5],
}


def alone(scores: list[float]) -> dict[str, Any]:
    """One group of rows of one token each."""
    return {"answers": [1] * len(scores), "group": [0] * len(scores), "token_rewards": scores}


def parts(*rows: list[float]) -> dict[str, Any]:
    return alone([0.0] * len(rows)) | {"reward_parts": [*rows]}


def sure(**fields: Any) -> dict[str, Any]:
    return alone([4.0, 1.0]) | fields


# Rows, estimator, its parameters; advantages, and returns where they differ.
BY_HAND = {
    # Group 7: mean 0.5, deviation sqrt(0.5 / 2) = 0.5. Group 3: mean 2, deviation sqrt(2 / 1). Group 5 is alone.
    "grpo: distances in deviations": (MIXED, "grpo", {}, [1, 1, 0.5**0.5, -1, -1, -1, 0, 0, 0, -(0.5**0.5)]),
    "dr. grpo: without the deviation": (MIXED, "grpo", BARE, [0.5, 0.5, 1, -0.5, -0.5, -0.5, 0, 0, 0, -1]),
    "grpo: a score is the sum of token rewards": (
        {"answers": [2, 2], "group": [0, 0], "token_rewards": [0.5, 0.5, -1.0, 1.0]}, "grpo", BARE,
        [0.5, 0.5, -0.5, -0.5],
    ),
    "grpo: none on tokens of others": (
        {"answers": [3, 1], "group": [0, 0], "token_rewards": [0.0, 0, 2, 0],
         "response_mask": [True, False, True, True]},
        "grpo", BARE, [1, 0, 1, -1],
    ),
    "grpo_passk: only the best, by its lead": (
        {"answers": [1, 1, 2, 1, 1], "group": [4, 2, 4, 2, 4], "token_rewards": [1.0, 6, 0, 3, 2, 0]},
        "grpo_passk", BARE, [0, 4, 2, 2, 0, 0],
    ),
    # Scores 0, 1, 5: deviation sqrt((4 + 1 + 9) / 2).
    "grpo_passk: in deviations": (alone([0.0, 1.0, 5.0]), "grpo_passk", {}, [0, 0, 4 / 7**0.5]),
    "grpo_passk: two alike have no lead": (alone([3.0, 3.0, 1.0]), "grpo_passk", {}, [0, 0, 0]),
    # Means of the others: 5.5, 4 and 2.5.
    "rloo: the others are the baseline": (alone([1.0, 4.0, 7.0]), "rloo", {}, [-4.5, 0, 4.5]),
    # Three written tokens of a row of score 0, one of a row of score 4: the baseline is 4 / 4.
    "opo: rows count by their written tokens": (
        {"answers": [3, 2], "group": [0, 0], "token_rewards": [0.0, 0, 0, 0, 4],
         "response_mask": [True, True, True, False, True]},
        "opo", {}, [-1, -1, -1, 0, 3],
    ),
    # Two of four rows have a score: alpha 2; the mean is 1.
    "gpg: scaled by rows with a score": (alone([0.0, 0.0, 1.0, 3.0]), "gpg", {}, [-2, -2, 0, 4]),
    "gpg: no row has a score": (alone([0.0, 0.0]), "gpg", {}, [0, 0]),
    # Each part in its group is 1, 0, -1, whatever its size.
    "gdpo: parts count alike": (parts([3.0, 300.0], [2.0, 200.0], [1.0, 100.0]), "gdpo", {}, [1, 0, -1]),
    "gdpo: weights": (
        parts([3.0, 1.0], [2.0, 2.0], [1.0, 3.0]), "gdpo", {"gdpo_reward_weights": (1.0, 3.0)}, [-1, 0, 1],
    ),
    # Residuals 0 + 0.5 * 2 - 1 = 0 and 4 - 2, so 0 + 0.25 * 2 and 2; and 1 - 2. Mean of 0.5, 2, -1: 0.5, deviation 1.5.
    "gae: residuals are summed backwards": (
        {"answers": [2, 1], "token_rewards": [0.0, 4.0, 1.0], "values": [1.0, 2.0, 2.0]},
        "gae", {"gamma": 0.5, "lam": 0.5}, [0, 1, -1], [1.5, 4, 1],
    ),
    # Residuals 0 + 3 - 1 and 5 - 3; the tool's value 100 and reward 100 play no part.
    "gae: across a tool's tokens": (
        {"answers": [3], "token_rewards": [0.0, 100.0, 5.0], "values": [1.0, 100.0, 3.0],
         "response_mask": [True, False, True]},
        "gae", {"gamma": 1.0, "lam": 0.0}, [0, 0, 0], [3, 0, 5],
    ),
    # Returns 0.5 * 4, 4 and 6: mean 4, deviation 2.
    "reinforce_plus_plus: whitened over the step": (
        {"answers": [2, 1], "token_rewards": [0.0, 4.0, 6.0]},
        "reinforce_plus_plus", {"gamma": 0.5}, [-1, 0, 1], [2, 4, 6],
    ),
    # Distances 1, 1, 1 and -1 on four tokens: mean 0.5, variance (3 * 0.25 + 2.25) / 3 = 1.
    "reinforce_plus_plus_baseline: token by token": (
        {"answers": [3, 1], "group": [0, 0], "token_rewards": [0.0, 0.0, 5.0, 3.0]},
        "reinforce_plus_plus_baseline", {}, [0.5, 0.5, 0.5, -1.5],
    ),
    # A group of one is 0 before whitening: distances 0, 1, 1, -1 of mean 0.25 and variance 11 / 12.
    "reinforce_plus_plus_baseline: a group of one": (
        {"answers": [1, 2, 1], "group": [0, 1, 1], "token_rewards": [7.0, 0.0, 5.0, 3.0]},
        "reinforce_plus_plus_baseline", {}, [value / (11 / 12) ** 0.5 for value in (-0.25, 0.75, 0.75, -1.25)],
    ),
    "remax: less the greedy response's reward": (
        {"answers": [3, 1], "token_rewards": [0.5, 9.0, 1.0, 2.0], "response_mask": [True, False, True, True],
         "greedy_rewards": [1.0, 3.0]},
        "remax", {}, [0.5, 0, 0, -1], [1.5, 0, 1, 2],
    ),
    # Position 1: returns 4 and 1 with weights 1 and 1.5 have the mean 2.2. Position 0 has one row, so no baseline.
    "optimal_token_baseline: by gradients": (TOOL, "optimal_token_baseline", {}, [4, 1.8, 0, -1.2], [4, 4, 0, 1]),
    # Position 0: returns 4 and 1 with weights 0.5 and 1.5 have the mean 1.75. Position 1 has one row.
    "with tools: among written tokens": (TOOL, "tir_optimal_token_baseline", {}, [2.25, 4, 0, -0.75], [4, 4, 0, 1]),
    # Weights 0.5 ** 2 and 1: returns 4 and 1 have the mean 2 / 1.25.
    "optimal_token_baseline: importance weights squared": (
        sure(old_log_probs=[HALF] * 2, sum_pi_squared=[1.0, 1.0], importance_weights=[0.5, 1.0]),
        "optimal_token_baseline", {}, [2.4, -0.6], [4, 1],
    ),
    # 1 - 2 pi + pi^2 comes out as -1e-7 instead of 0: weights that would add up to less than nothing.
    "optimal_token_baseline: rounding in sure tokens": (
        sure(old_log_probs=[0.0, 0.0], sum_pi_squared=[1 - 1e-7] * 2), "optimal_token_baseline", {}, [4, 1], [4, 1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_HAND)
def test_numbers_by_hand(make_batch, case):
    fields, name, parameters, advantages, *returns = BY_HAND[case]
    found = estimator(name, **parameters)(make_batch(**fields))
    assert found[0].tolist() == pytest.approx(advantages, abs=5e-6)
    assert found[1].tolist() == pytest.approx(*returns or [advantages], abs=5e-6)


@every_estimator
@given(
    SEEDS,
    st.fixed_dictionaries(
        {
            "gamma": st.sampled_from([0.0, 0.5, 0.95, 1.0]),
            "lam": st.sampled_from([0.0, 0.5, 0.95, 1.0]),
            "norm_adv_by_std_in_grpo": st.booleans(),
            "gdpo_reward_weights": st.sampled_from([(), (0.5, 2.0, -1.0)]),
        }
    ),
    st.booleans(),
)
def test_it_agrees_with_a_double_precision_reference(make_batch, name, seed, parameters, corrected):
    batch = drawn(make_batch, seed)
    if corrected:
        batch.importance_weights = 0.5 + batch.sum_pi_squared
    expected = vars(references)[name](batch, **parameters)
    for ours, rows in zip(estimator(name, **parameters)(batch), expected, strict=True):
        assert ours.tolist() == pytest.approx(flat(rows), rel=1e-6, abs=2e-6)


def test_a_row_of_thousands_of_tokens_agrees_with_it_too(make_batch):
    rewards, values = torch.randn(2, 2053, generator=torch.Generator().manual_seed(0))
    batch = make_batch([2000, 53], token_rewards=rewards, values=values, response_mask=values < 1)
    expected = references.gae(batch, gamma=1.0, lam=0.95)
    for ours, rows in zip(estimator("gae", lam=0.95)(batch), expected, strict=True):
        assert ours.tolist() == pytest.approx(flat(rows), rel=1e-6, abs=3e-6)


def test_a_wrong_number_of_weights_is_rejected(make_batch):
    with pytest.raises(ValueError, match=r"shorter|longer"):
        estimator("gdpo", gdpo_reward_weights=(1.0,))(make_batch(**parts([3.0, 1.0], [2.0, 2.0])))


@given(st.floats(-1e6, 1e6, width=32), st.integers(2, 9))
def test_a_group_of_equal_scores_has_no_advantage(make_batch, score, count):
    assert not estimator("grpo")(make_batch(**alone([score] * count)))[0].any()


def needed(batch, name):
    """The batch with nothing filled but what the estimator says it reads."""
    return batch.only("response_mask", "token_rewards", *ESTIMATORS[name].reads)


@every_estimator
@few
@given(SEEDS)
def test_advantages_and_returns_are_finite_floats_and_0_on_tokens_not_written(make_batch, name, seed):
    batch = drawn(make_batch, seed)
    for found in estimator(name, **SETTINGS)(batch):
        assert found.dtype == torch.float32
        assert found.shape == batch.response_ids.shape
        assert found.isfinite().all()
        assert not found[~batch.response_mask].any()


@every_estimator
def test_an_estimator_reads_the_field_it_needs_and_no_other(make_batch, name):
    batch = drawn(make_batch, seed=3)
    expected = estimator(name, **SETTINGS)(batch)[0]
    assert torch.equal(estimator(name, **SETTINGS)(needed(batch, name))[0], expected)
    assert expected.any()
    for field in ESTIMATORS[name].reads:
        with pytest.raises(AssertionError):
            estimator(name, **SETTINGS)(replace(batch, **{field: None}))


@every_estimator
@pytest.mark.parametrize("written", [0, 1])
def test_a_step_of_no_written_token_or_one_has_no_whitened_advantage_and_no_nan(make_batch, name, written):
    batch = drawn(make_batch, seed=3)
    batch.response_mask = torch.arange(len(batch.response_ids)) < written
    advantages, returns = estimator(name, **SETTINGS)(batch)
    assert advantages.isfinite().all()
    assert returns.isfinite().all()
    assert not advantages[written:].any()


@pytest.mark.parametrize("name", sorted(GROUPED))
def test_a_group_of_one_has_no_advantage(make_batch, name):
    batch = drawn(make_batch, seed=3)
    batch.group = torch.arange(len(batch))
    assert not estimator(name, **SETTINGS)(batch)[0].any()


# -- whitening and discounted sums -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, 3.0, 5.0], [-1, 0, 1])]  # mean 3, sample deviation 2
    + [(equal, [0] * len(equal)) for equal in ([], [3.0], [0.1] * 1000, [1e6 + 0.1] * 1001)],
)
def test_whitened_values_have_mean_0_and_sample_variance_1_and_equal_ones_are_0(values, expected):
    assert whitened(torch.tensor(values)).tolist() == pytest.approx(expected, abs=1e-6)


def test_large_values_that_are_close_together_are_whitened_as_if_they_were_small():
    small = torch.arange(1001.0).fmod(7)
    assert whitened(small + 2**20).tolist() == pytest.approx(whitened(small).tolist(), abs=1e-6)


# 1 + 0.5 * 2 + 0.25 * 4, 2 + 0.5 * 4, 4; and a row of one: 8. More than a block of blocks; and 5,000 halvings.
@pytest.mark.parametrize(
    ("values", "lengths", "factor", "first"),
    [
        ([1.0, 2.0, 4.0, 8.0], [3, 1], 0.5, [3, 4, 4, 8]),
        ([1.0] * (BLOCK * BLOCK + BLOCK + 1), None, 1.0, [BLOCK * BLOCK + BLOCK + 1, BLOCK * BLOCK + BLOCK]),
        ([1.0] * 5000, None, 0.5, [2, 2]),
    ],
)
def test_each_element_gets_itself_and_the_discounted_later_ones_of_its_row(values, lengths, factor, first):
    sums = discounted_sums(torch.tensor(values), torch.tensor(lengths or [len(values)]), factor)
    assert sums[: len(first)].tolist() == first
    assert sums.isfinite().all() and sums[-1] == values[-1]


BLOCKS = st.one_of(st.integers(0, 5), st.integers(BLOCK - 1, BLOCK + 1), st.just(3 * BLOCK))


@given(st.lists(BLOCKS, max_size=5), st.sampled_from([0.0, 0.3, 0.95, 1.0]), st.integers(0, 9))
def test_discounted_sums_agree_with_a_loop_over_the_elements(lengths, factor, seed):
    values = torch.randn(sum(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    expected = []
    for row in values.split(lengths):
        running, backwards = 0.0, []
        for value in reversed(row.tolist()):
            running = value + factor * running
            backwards.append(running)
        expected += backwards[::-1]
    sums = discounted_sums(values, torch.tensor(lengths, dtype=torch.int64), factor)
    assert sums.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)

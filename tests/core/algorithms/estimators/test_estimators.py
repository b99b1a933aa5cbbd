"""What holds of every estimator, or of all of a kind."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.config.catalog import ESTIMATORS
from hybridrl.core.batch import Batch
from hybridrl.core.required import required
from tests.core.algorithms.estimators.rows import SEEDS, drawn
from tests.core.algorithms.parameters import estimator

SETTINGS = {"gamma": 0.9, "lam": 0.8}
every_estimator = pytest.mark.parametrize("name", [name for name in ESTIMATORS if not name.endswith("_vectorized")])
few = settings(max_examples=20)

# Those whose baseline comes from the row's group, and those of them that look beyond it as well.
GROUPED = {"grpo", "grpo_passk", "rloo", "opo", "gpg", "gdpo", "reinforce_plus_plus_baseline"}
GROUPED |= {"optimal_token_baseline", "tir_optimal_token_baseline"}
STEP_WIDE = {"gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gpg", "gdpo"}


def assert_close(found, expected):
    assert found.flatten().tolist() == pytest.approx(expected.flatten().tolist(), rel=1e-5, abs=1e-5)


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


@every_estimator
@few
@given(SEEDS, st.randoms(use_true_random=False))
def test_rows_in_another_order_get_the_same_in_that_order(make_batch, name, seed, random):
    batch = drawn(make_batch, seed)
    order = random.sample(range(len(batch)), len(batch))
    expected = replace(batch, advantages=estimator(name, **SETTINGS)(batch)[0]).select(order).advantages
    assert_close(estimator(name, **SETTINGS)(batch.select(order))[0], expected)


@every_estimator
@few
@given(SEEDS)
def test_tokens_that_nobody_wrote_behind_the_rows_change_nothing(make_batch, name, seed):
    batch = drawn(make_batch, seed)
    expected = batch.padded(estimator(name, **SETTINGS)(batch)[0])
    longer = lengthened(batch, 2)
    found = longer.padded(estimator(name, **SETTINGS)(longer)[0])
    assert_close(found, torch.nn.functional.pad(expected, (0, 2)))


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - STEP_WIDE - {"grpo_vectorized", "rloo_vectorized"}))
@few
@given(SEEDS)
def test_other_groups_change_nothing_where_the_step_as_a_whole_is_not_looked_at(make_batch, name, seed):
    batch = drawn(make_batch, seed)
    mine = (batch.group == batch.group[0]).nonzero().squeeze(1)
    among_others = replace(batch, advantages=estimator(name, **SETTINGS)(batch)[0]).select(mine).advantages
    assert_close(estimator(name, **SETTINGS)(batch.select(mine))[0], among_others)


# Not so where the number of scores of 0 makes a scale, or a lone tail keeps its return.
@pytest.mark.parametrize("name", sorted(GROUPED - {"gpg", "optimal_token_baseline", "tir_optimal_token_baseline"}))
@few
@given(SEEDS, st.floats(-3, 3, width=16))
def test_adding_the_same_to_all_scores_of_a_group_changes_nothing(make_batch, name, seed, shift):
    batch = drawn(make_batch, seed)
    batch.response_mask[batch.last_tokens] = True
    by_group = shift * (1 + batch.group)
    shifted = replace(
        batch,
        token_rewards=required(batch.token_rewards).index_add(0, batch.last_tokens, by_group.float()),
        reward_parts=batch.reward_parts + by_group[:, None],
    )
    undivided = {"norm_adv_by_std_in_grpo": False}  # a deviation of rounding errors would blow these up
    assert_close(estimator(name, **undivided)(shifted)[0], estimator(name, **undivided)(batch)[0])


@pytest.mark.parametrize("name", sorted(GROUPED))
def test_a_group_of_one_has_no_advantage(make_batch, name):
    batch = drawn(make_batch, seed=3)
    batch.group = torch.arange(len(batch))
    assert not estimator(name, **SETTINGS)(batch)[0].any()


def lengthened(batch: Batch, by: int) -> Batch:
    """Every row with as many more tokens, not written, without reward and with numbers of no meaning."""
    lengths = batch.response_lengths
    ends = lengths.cumsum(0).repeat_interleave(by)
    old = torch.ones(int(lengths.sum()) + by * len(batch), dtype=torch.bool)
    old[ends + torch.arange(by * len(batch))] = False

    def filled(values, fill):
        return torch.full(old.shape, fill, dtype=values.dtype).masked_scatter(old, values)

    return replace(
        batch,
        response_lengths=lengths + by,
        response_ids=filled(batch.response_ids, 0),
        response_mask=filled(batch.response_mask, False),
        token_rewards=filled(batch.token_rewards, 0.0),
        values=filled(batch.values, 7.0),
        old_log_probs=filled(batch.old_log_probs, -2.0),
        sum_pi_squared=filled(batch.sum_pi_squared, 0.4),
    )

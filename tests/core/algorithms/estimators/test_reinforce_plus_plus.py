import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.core.algorithms.estimators import reinforce_plus_plus, reinforce_plus_plus_baseline
from tests.core.algorithms.estimators.rows import SEEDS, by_row, drawn, flat, group_mates, on_tokens, scores, whitened


def returns_reference(batch, gamma):
    """Each written token's rewards to come on written tokens, a discount for each of them between."""
    found = []
    for rewards, mask in zip(by_row(batch, batch.token_rewards), by_row(batch, batch.response_mask), strict=True):
        row = [0.0 for _ in rewards]
        written = [step for step, mine in enumerate(mask) if mine]
        for number, first in enumerate(written):
            row[first] = sum(gamma**later * rewards[step] for later, step in enumerate(written[number:]))
        found.append(row)
    return found


def baseline_reference(batch):
    found = scores(batch)
    means = [np.mean([found[mate] for mate in group_mates(batch, row)]) for row in range(len(batch))]
    return whitened(batch, on_tokens(batch, [score - mean for score, mean in zip(found, means, strict=True)]))


def test_discounted_returns_are_whitened_over_the_step(make_batch):
    # Returns 0.5 * 4 = 2, 4 and 6: mean 4, sample deviation 2.
    batch = make_batch([2, 1], token_rewards=[0.0, 4.0, 6.0])
    advantages, returns = reinforce_plus_plus(batch, gamma=0.5)
    assert returns.tolist() == [2, 4, 6]
    assert advantages.tolist() == pytest.approx([-1, 0, 1])


def test_tokens_that_were_not_written_are_passed_over(make_batch):
    # The reward 8 lies on a tool's token, the reward 4 in the second turn, two written tokens after the first 2.
    batch = make_batch([5], token_rewards=[1.0, 2.0, 8.0, 0.0, 4.0], response_mask=[True, True, False, True, True])
    assert reinforce_plus_plus(batch, gamma=0.5)[1].tolist() == [2.5, 3, 0, 2, 4]


@given(SEEDS, st.sampled_from([0.0, 0.9, 1.0]))
def test_it_agrees_with_a_double_precision_reference(make_batch, seed, gamma):
    batch = drawn(make_batch, seed)
    advantages, returns = reinforce_plus_plus(batch, gamma=gamma)
    expected = returns_reference(batch, gamma)
    assert returns.tolist() == pytest.approx(flat(expected), rel=1e-6, abs=1e-6)
    assert advantages.tolist() == pytest.approx(flat(whitened(batch, expected)), rel=1e-6, abs=1e-6)


def test_with_a_baseline_distances_from_the_group_mean_are_whitened_token_by_token(make_batch):
    # Distances 1, 1, 1 and -1 on four tokens: mean 0.5, sample variance (3 * 0.25 + 2.25) / 3 = 1.
    batch = make_batch([3, 1], group=[0, 0], token_rewards=[0.0, 0.0, 5.0, 3.0])
    advantages, returns = reinforce_plus_plus_baseline(batch)
    assert advantages.tolist() == returns.tolist() == pytest.approx([0.5, 0.5, 0.5, -1.5])


def test_with_a_baseline_a_group_of_one_is_0_before_whitening_and_not_after(make_batch):
    # Distances 0 and 1, 1, -1: mean 0.25, sample variance (0.0625 + 2 * 0.5625 + 1.5625) / 3 = 11 / 12.
    batch = make_batch([1, 2, 1], group=[0, 1, 1], token_rewards=[7.0, 0.0, 5.0, 3.0])
    advantages, _ = reinforce_plus_plus_baseline(batch)
    deviation = (11 / 12) ** 0.5
    assert advantages.tolist() == pytest.approx([value / deviation for value in (-0.25, 0.75, 0.75, -1.25)])


@given(SEEDS)
def test_with_a_baseline_it_agrees_with_a_double_precision_reference(make_batch, seed):
    batch = drawn(make_batch, seed)
    found, _ = reinforce_plus_plus_baseline(batch)
    assert found.tolist() == pytest.approx(flat(baseline_reference(batch)), rel=1e-6, abs=2e-6)

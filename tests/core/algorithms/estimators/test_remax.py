import pytest
from hypothesis import given

from hybridrl.core.algorithms.estimators import remax
from tests.core.algorithms.estimators.rows import SEEDS, by_row, drawn, flat


def reference(batch):
    advantages, returns = [], []
    rows = zip(by_row(batch, batch.token_rewards), by_row(batch, batch.response_mask), strict=True)
    for row, (rewards, mask) in enumerate(rows):
        seen = [reward * mine for reward, mine in zip(rewards, mask, strict=True)]
        returns.append([sum(seen[step:]) * mask[step] for step in range(len(seen))])
        greedy = float(batch.greedy_rewards[row])
        advantages.append([(value - greedy) * mine for value, mine in zip(returns[-1], mask, strict=True)])
    return advantages, returns


def test_the_greedy_answers_reward_is_taken_off_the_rewards_to_come(make_batch):
    batch = make_batch(
        [3, 1],
        token_rewards=[0.5, 9.0, 1.0, 2.0],
        response_mask=[True, False, True, True],
        greedy_rewards=[1.0, 3.0],
    )
    advantages, returns = remax(batch)
    assert returns.tolist() == [1.5, 0, 1, 2]
    assert advantages.tolist() == [0.5, 0, 0, -1]


@given(SEEDS)
def test_it_agrees_with_a_double_precision_reference(make_batch, seed):
    batch = drawn(make_batch, seed)
    for ours, expected in zip(remax(batch), reference(batch), strict=True):
        assert ours.tolist() == pytest.approx(flat(expected), rel=1e-6, abs=1e-6)

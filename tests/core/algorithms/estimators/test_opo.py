import pytest
from hypothesis import given

from hybridrl.core.algorithms.estimators import opo
from tests.core.algorithms.estimators.rows import SEEDS, by_row, drawn, flat, group_mates, on_tokens, scores


def reference(batch):
    lengths = [sum(row) for row in by_row(batch, batch.response_mask)]
    found, all_scores = [], scores(batch)
    for row, score in enumerate(all_scores):
        mates = group_mates(batch, row)
        weighted, total = sum(lengths[m] * all_scores[m] for m in mates), sum(lengths[m] for m in mates)
        found.append(score - weighted / total if total else 0.0)
    return on_tokens(batch, found)


def test_rows_weigh_in_the_baseline_by_the_tokens_that_the_policy_wrote(make_batch):
    # Three written tokens of a row of score 0, one of a row of score 4: the baseline is 4 / 4 = 1.
    batch = make_batch(
        [3, 2], group=[0, 0], token_rewards=[0.0, 0.0, 0.0, 0.0, 4.0], response_mask=[True, True, True, False, True]
    )
    advantages, returns = opo(batch)
    assert advantages.tolist() == returns.tolist() == [-1, -1, -1, 0, 3]


@given(SEEDS)
def test_it_agrees_with_a_double_precision_reference(make_batch, seed):
    batch = drawn(make_batch, seed)
    found, _ = opo(batch)
    assert found.tolist() == pytest.approx(flat(reference(batch)), rel=1e-6, abs=1e-6)


@given(SEEDS)
def test_the_advantages_of_all_tokens_of_a_group_sum_to_zero(make_batch, seed):
    batch = drawn(make_batch, seed)
    tokens = opo(batch)[0]
    for group in batch.group.unique():
        assert float(tokens[batch.group[batch.response_row] == group].sum()) == pytest.approx(0, abs=1e-5)

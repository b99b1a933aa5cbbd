import numpy as np
import pytest
from hypothesis import given

from hybridrl.core.algorithms.estimators import gpg
from tests.core.algorithms.estimators.rows import SEEDS, drawn, flat, group_mates, on_tokens, one_group, scores


def reference(batch):
    found = scores(batch)
    alpha = len(batch) / max(sum(score != 0 for score in found), 1)
    means = [np.mean([found[mate] for mate in group_mates(batch, row)]) for row in range(len(batch))]
    return on_tokens(batch, [alpha * (score - mean) for score, mean in zip(found, means, strict=True)])


def test_the_distance_from_the_mean_is_scaled_by_all_rows_over_those_with_a_score(make_batch):
    # Four rows, two with a score: alpha 2; the mean is 1.
    batch = make_batch([1, 1, 1, 1], group=[0] * 4, token_rewards=[0.0, 0.0, 1.0, 3.0])
    advantages, returns = gpg(batch)
    assert advantages.tolist() == returns.tolist() == [-2, -2, 0, 4]


def test_where_no_row_has_a_score_no_token_has_an_advantage(make_batch):
    assert gpg(one_group(make_batch, [0.0, 0.0]))[0].tolist() == [0, 0, 0]


@given(SEEDS)
def test_it_agrees_with_a_double_precision_reference(make_batch, seed):
    batch = drawn(make_batch, seed)
    found, _ = gpg(batch)
    assert found.tolist() == pytest.approx(flat(reference(batch)), rel=1e-6, abs=1e-6)

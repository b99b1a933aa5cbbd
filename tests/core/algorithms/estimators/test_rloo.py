import numpy as np
import pytest
from hypothesis import given

from hybridrl.core.algorithms.estimators import rloo
from tests.core.algorithms.estimators.rows import SEEDS, drawn, flat, group_mates, on_tokens, one_group, scores


def reference(batch):
    found, all_scores = [], scores(batch)
    for row, score in enumerate(all_scores):
        others = [all_scores[mate] for mate in group_mates(batch, row) if mate != row]
        found.append(score - np.mean(others) if others else 0.0)
    return on_tokens(batch, found)


def test_the_mean_of_the_others_is_the_baseline(make_batch):
    # Others' means of 1, 4 and 7: 5.5, 4 and 2.5.
    advantages, returns = rloo(one_group(make_batch, [1.0, 4.0, 7.0]))
    assert advantages.tolist() == returns.tolist() == [-4.5, 0, 0, 4.5, 4.5, 4.5]


@given(SEEDS)
def test_it_agrees_with_a_double_precision_reference(make_batch, seed):
    batch = drawn(make_batch, seed)
    found, _ = rloo(batch)
    assert found.tolist() == pytest.approx(flat(reference(batch)), rel=1e-6, abs=1e-6)

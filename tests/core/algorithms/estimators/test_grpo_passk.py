import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.core.algorithms.estimators import grpo_passk
from tests.core.algorithms.estimators.rows import SEEDS, drawn, flat, group_mates, on_tokens, one_group, scores

PLAIN = {"norm_adv_by_std_in_grpo": False}


def reference(batch, normalise):
    found, all_scores = [], scores(batch)
    for row in range(len(batch)):
        mates = sorted(group_mates(batch, row), key=lambda mate: (-all_scores[mate], mate))
        if mates[0] != row or len(mates) == 1:
            found.append(0.0)
            continue
        deviation = np.std([all_scores[mate] for mate in mates], ddof=1) + 1e-6 if normalise else 1.0
        found.append((all_scores[row] - all_scores[mates[1]]) / deviation)
    return on_tokens(batch, found)


def test_only_the_best_answer_of_a_group_has_an_advantage_its_lead_over_the_second(make_batch):
    batch = make_batch([1, 1, 2, 1, 1], group=[4, 2, 4, 2, 4], token_rewards=[1.0, 6.0, 0.0, 3.0, 2.0, 0.0])
    assert grpo_passk(batch, **PLAIN)[0].tolist() == [0, 4, 2, 2, 0, 0]


def test_the_lead_may_be_counted_in_deviations_of_the_group(make_batch):
    # Scores 0, 1, 5: deviation sqrt((4 + 1 + 9) / 2) = sqrt(7).
    advantages, returns = grpo_passk(one_group(make_batch, [0.0, 1.0, 5.0]), norm_adv_by_std_in_grpo=True)
    assert advantages.tolist() == returns.tolist() == pytest.approx([0, 0, 0] + [4 / 7**0.5] * 3)


def test_two_that_are_best_alike_have_no_lead(make_batch):
    assert not grpo_passk(one_group(make_batch, [3.0, 3.0, 1.0]), norm_adv_by_std_in_grpo=True)[0].any()


@given(SEEDS, st.booleans())
def test_it_agrees_with_a_double_precision_reference(make_batch, seed, normalise):
    batch = drawn(make_batch, seed)
    found, _ = grpo_passk(batch, norm_adv_by_std_in_grpo=normalise)
    assert found.tolist() == pytest.approx(flat(reference(batch, normalise)), rel=1e-6, abs=1e-6)

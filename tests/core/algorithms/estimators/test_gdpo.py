import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.core.algorithms.estimators import gdpo
from tests.core.algorithms.estimators.rows import SEEDS, drawn, flat, group_mates, on_tokens, whitened

PLAIN = {"norm_adv_by_std_in_grpo": True, "gdpo_reward_weights": ()}


def reference(batch, weights, normalise):
    found = []
    for row in range(len(batch)):
        total = 0.0
        for part, weight in zip(batch.reward_parts.double().T.tolist(), weights, strict=True):
            group = [part[mate] for mate in group_mates(batch, row)]
            deviation = np.std(group, ddof=1) + 1e-6 if normalise and len(group) > 1 else 1.0
            total += weight * (part[row] - np.mean(group)) / deviation
        found.append(total)
    return whitened(batch, on_tokens(batch, found))


def test_parts_of_any_size_count_alike(make_batch):
    # Each part in its group: 1, 0, -1. Together 0, 0 and 0 for opposite ones, 2, 0 and -2 for like ones.
    like = make_batch([1, 1, 1], group=[0] * 3, reward_parts=[[3.0, 300.0], [2.0, 200.0], [1.0, 100.0]])
    opposite = make_batch([1, 1, 1], group=[0] * 3, reward_parts=[[3.0, 100.0], [2.0, 200.0], [1.0, 300.0]])
    advantages, returns = gdpo(like, **PLAIN)
    assert advantages.tolist() == returns.tolist() == pytest.approx([1, 0, -1])
    assert gdpo(opposite, **PLAIN)[0].tolist() == pytest.approx([0, 0, 0], abs=0.01)


def test_weights_tell_how_much_a_part_counts(make_batch):
    batch = make_batch([1, 1, 1], group=[0] * 3, reward_parts=[[3.0, 1.0], [2.0, 2.0], [1.0, 3.0]])
    weighed = gdpo(batch, norm_adv_by_std_in_grpo=True, gdpo_reward_weights=(1.0, 3.0))
    assert weighed[0].tolist() == pytest.approx([-1, 0, 1])


def test_a_wrong_number_of_weights_is_rejected(make_batch):
    batch = make_batch([1, 1], group=[0, 0], reward_parts=[[3.0, 1.0], [2.0, 2.0]])
    with pytest.raises(ValueError, match=r"shorter|longer"):
        gdpo(batch, norm_adv_by_std_in_grpo=True, gdpo_reward_weights=(1.0,))


@given(SEEDS, st.sampled_from([(), (0.5, 2.0, -1.0)]), st.booleans())
def test_it_agrees_with_a_double_precision_reference(make_batch, seed, weights, normalise):
    batch = drawn(make_batch, seed)
    found, _ = gdpo(batch, norm_adv_by_std_in_grpo=normalise, gdpo_reward_weights=weights)
    expected = reference(batch, weights or (1.0, 1.0, 1.0), normalise)
    assert found.tolist() == pytest.approx(flat(expected), rel=1e-6, abs=1e-6)

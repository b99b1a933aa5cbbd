import json
import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.config.findings import ConfigError
from hybridrl.data.order import Curriculum, Order, PromptOrder, WeightedOrder

sizes = st.integers(1, 50)
seeds = st.integers(0, 2**32)


@given(size=sizes, seed=seeds, epoch=st.integers(0, 5))
def test_every_epoch_draws_every_row_once(size, seed, epoch):
    order = PromptOrder(size, seed, shuffle=True)
    assert sorted(order.rows(epoch * size, size)) == list(range(size))


@given(size=sizes, seed=seeds, batches=st.lists(st.integers(0, 30), max_size=10))
def test_the_order_is_the_same_in_batches_of_any_size(size, seed, batches):
    drawn: list[int] = []
    for count in batches:
        drawn += PromptOrder(size, seed, shuffle=True).rows(len(drawn), count)
    assert drawn == PromptOrder(size, seed, shuffle=True).rows(0, sum(batches))


@given(size=sizes, seed=seeds, position=st.integers(0, 1000))
def test_without_shuffle_every_epoch_is_in_file_order(size, seed, position):
    assert PromptOrder(size, seed, shuffle=False).rows(position, 1) == [position % size]


def test_epochs_and_seeds_differ():
    order = PromptOrder(100, seed=1, shuffle=True)
    assert order.rows(0, 100) != order.rows(100, 100)
    assert order.rows(0, 100) != PromptOrder(100, seed=2, shuffle=True).rows(0, 100)
    assert order.rows(0, 100) != list(range(100))


def weighted(sizes: list[int], weights: list[float], *, seed: int = 1, shuffle: bool = True) -> WeightedOrder:
    """Return an order over consecutive groups of rows: 0..a, a..a+b, ..."""
    ends = np.cumsum(sizes)
    groups = [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return WeightedOrder(groups, weights, seed, shuffle)


groups = st.lists(st.tuples(st.integers(1, 20), st.floats(0.1, 10)), min_size=1, max_size=4)


def test_each_group_has_its_share_of_every_epoch_whatever_its_size():
    order = weighted([90, 10, 20], [3, 2, 1])
    for epoch in range(3):
        rows = np.array(order.rows(epoch * 120, 120))
        assert [(rows < 90).sum(), ((rows >= 90) & (rows < 100)).sum(), (rows >= 100).sum()] == [60, 40, 20]


@given(groups=groups, seed=seeds, shuffle=st.booleans())
def test_after_full_epochs_the_counts_of_a_groups_rows_differ_by_at_most_one(groups, seed, shuffle):
    sizes = [size for size, _ in groups]
    order = weighted(sizes, [weight for _, weight in groups], seed=seed, shuffle=shuffle)
    drawn = order.rows(0, 5 * order.size)
    for size, end in zip(sizes, np.cumsum(sizes), strict=True):
        group = [row for row in drawn if end - size <= row < end]
        times = np.bincount(np.array(group, dtype=int) - (end - size), minlength=size)
        assert times.max() - times.min() <= 1


@given(groups=groups, seed=seeds, batches=st.lists(st.integers(0, 30), max_size=10))
def test_a_weighted_order_is_the_same_in_batches_of_any_size(groups, seed, batches):
    sizes, weights = [size for size, _ in groups], [weight for _, weight in groups]
    drawn: list[int] = []
    for count in batches:
        drawn += weighted(sizes, weights, seed=seed).rows(len(drawn), count)
    assert drawn == weighted(sizes, weights, seed=seed).rows(0, sum(batches))


@given(groups=groups)
def test_the_shares_add_up_to_an_epoch_and_are_off_by_less_than_one(groups):
    sizes, weights = [size for size, _ in groups], [weight for _, weight in groups]
    order = weighted(sizes, weights)
    assert order.shares.sum() == order.size == sum(sizes)
    assert np.abs(order.shares - np.array(weights) / sum(weights) * sum(sizes)).max() < 1


def test_without_shuffle_weighted_groups_follow_one_another_and_continue_in_the_next_epoch():
    order = weighted([2, 4], [2, 1], shuffle=False)  # 4 of the first, 2 of the second per epoch
    assert order.rows(0, 12) == [0, 1, 0, 1, 2, 3, 0, 1, 0, 1, 4, 5]


def test_custom_epochs_follow_one_another():
    order = Order(lambda epoch: np.array([2, 0]) + epoch)
    assert order.size == 2
    assert order.rows(1, 4) == [0, 3, 1, 4]


def test_an_epoch_of_another_length_is_rejected():
    order = Order(lambda epoch: np.arange(3 - epoch))
    with pytest.raises(ConfigError, match="epoch 1 has 2 prompts, the first has 3"):
        order.rows(0, 4)


def test_the_largest_remainder_is_rounded_up():
    assert weighted([5, 5], [1, 2]).shares.tolist() == [3, 7]  # of 3.33 and 6.67


def curriculum(kind: str, size: int, *, seed: int = 1, shuffle: bool = True) -> Curriculum:
    return Curriculum(kind, size, seed, shuffle)


@given(size=sizes, seed=seeds, kind=st.sampled_from(["medium", "easy_first"]))
def test_without_rewards_a_curriculum_is_the_order_without_it(size, seed, kind):
    assert curriculum(kind, size, seed=seed).rows(0, 2 * size) == PromptOrder(size, seed, shuffle=True).rows(
        0, 2 * size
    )


def test_easy_first_goes_from_the_class_of_high_rates_to_that_of_low_ones_and_rows_without_a_reward_are_in_the_middle():
    order = curriculum("easy_first", 6, shuffle=False)
    assert order.rows(0, 6) == [0, 1, 2, 3, 4, 5]
    rewards = {0: [0.0, 0.4], 1: [0.95], 2: [0.24], 4: [3.0], 5: [-2.0]}  # rates 0.2, 0.95, 0.24, 0.5, 1, 0
    metrics = order.observe([(position, reward) for position, group in rewards.items() for reward in group])
    assert metrics == {"data/curriculum_rate": 0.5}
    assert order.rows(6, 6) == [1, 4, 3, 0, 2, 5]
    assert order.observe([(6, 1.0), (7, 1.0)]) == {"data/curriculum_rate": pytest.approx((0.95 + 1) / 2)}


def test_a_class_has_another_order_in_each_epoch():
    order = curriculum("easy_first", 40)
    for epoch in range(3):
        order.observe([(epoch * 40 + place, row % 2) for place, row in enumerate(order.rows(epoch * 40, 40))])
    second, third = order.rows(40, 40), order.rows(80, 40)
    assert all(row % 2 for row in second[:20] + third[:20]) and not any(row % 2 for row in second[20:] + third[20:])
    assert second[:20] != third[:20] and sorted(second) == list(range(40))


@pytest.mark.parametrize("seed", range(5))
def test_medium_samples_each_row_as_often_as_its_weight_up_to_rounding(seed):
    order = curriculum("medium", 10, seed=seed)
    rates = [0, 0, 0, 0, 0, 1, 1, 0.25, 0.5, 0.5]
    order.observe([(position, rates[row]) for position, row in enumerate(order.rows(0, 10))])
    # Weights 0.05 seven times, 4 * 0.25 * 0.75 + 0.05 = 0.8, and 1.05 twice; their sum is 3.25.
    counts, exact = Counter(order.rows(10, 10)), [0.05 * 10 / 3.25] * 7 + [0.8 * 10 / 3.25] + [1.05 * 10 / 3.25] * 2
    assert all(math.floor(share) <= counts[row] <= math.ceil(share) for row, share in enumerate(exact))
    many = Counter(row for epoch in range(1, 401) for row in order.rows(10 * epoch, 10))
    assert [many[row] / 400 for row in range(10)] == pytest.approx(exact, abs=0.07)


@given(
    kind=st.sampled_from(["medium", "easy_first"]),
    size=st.integers(1, 12),
    seed=seeds,
    steps=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    killed=st.integers(0, 12),
)
def test_a_resumed_curriculum_samples_the_same_and_an_epoch_depends_on_no_later_reward(kind, size, seed, steps, killed):
    """Steps of any sizes, also of several epochs."""
    order, position, drawn = curriculum(kind, size, seed=seed), 0, []
    for number, count in enumerate(steps):
        if number == killed:
            state = json.loads(json.dumps(order.state_dict()))
            order = curriculum(kind, size, seed=seed)
            order.load_state_dict(state)
        drawn.append(order.rows(position, count))
        rates = random.Random(f"{number}")
        order.observe([(at, rates.random()) for at in range(position, position + count)])
        position += count
    again, position = curriculum(kind, size, seed=seed), 0
    for number, count in enumerate(steps):
        assert again.rows(position, count) == drawn[number]
        rates = random.Random(f"{number}")
        again.observe([(at, rates.random()) for at in range(position, position + count)])
        position += count


def test_the_state_of_another_order_begins_a_curriculum_without_rates():
    order = curriculum("medium", 5)
    order.load_state_dict({"prompts": 12})
    assert sorted(order.rows(10, 5)) == list(range(5))

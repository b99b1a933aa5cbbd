import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.config.findings import ConfigError
from hybridrl.data.order import Order, PromptOrder, WeightedOrder

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

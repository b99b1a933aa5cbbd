from hypothesis import given
from hypothesis import strategies as st

from hybridrl.data.order import PromptOrder

sizes = st.integers(1, 50)
seeds = st.integers(0, 2**32)


@given(size=sizes, seed=seeds, epoch=st.integers(0, 5))
def test_every_epoch_draws_every_row_once(size: int, seed: int, epoch: int) -> None:
    order = PromptOrder(size, seed, shuffle=True)
    assert sorted(order.rows(epoch * size, size)) == list(range(size))


@given(size=sizes, seed=seeds, batches=st.lists(st.integers(0, 30), max_size=10))
def test_the_order_is_the_same_in_batches_of_any_size(size: int, seed: int, batches: list[int]) -> None:
    drawn: list[int] = []
    for count in batches:
        drawn += PromptOrder(size, seed, shuffle=True).rows(len(drawn), count)
    assert drawn == PromptOrder(size, seed, shuffle=True).rows(0, sum(batches))


@given(size=sizes, seed=seeds, position=st.integers(0, 1000))
def test_without_shuffle_rows_come_in_their_own_order_again_and_again(size: int, seed: int, position: int) -> None:
    assert PromptOrder(size, seed, shuffle=False).row(position) == position % size


def test_epochs_and_seeds_differ() -> None:
    order = PromptOrder(100, seed=1, shuffle=True)
    assert order.rows(0, 100) != order.rows(100, 100)
    assert order.rows(0, 100) != PromptOrder(100, seed=2, shuffle=True).rows(0, 100)
    assert order.rows(0, 100) != list(range(100))

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.core.algorithms.estimators import BLOCK, discounted_sums, following

LENGTHS = st.one_of(st.integers(0, 5), st.integers(BLOCK - 1, BLOCK + 1), st.just(3 * BLOCK))


def test_each_element_gets_itself_and_the_discounted_later_ones_of_its_row():
    # 1 + 0.5 * 2 + 0.25 * 4, 2 + 0.5 * 4, 4; and a row of its own: 8.
    sums = discounted_sums(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([3, 1]), 0.5)
    assert sums.tolist() == [3, 4, 4, 8]


@given(st.lists(LENGTHS, max_size=5), st.sampled_from([0.0, 0.3, 0.95, 1.0]), st.integers(0, 9))
def test_it_agrees_with_a_loop_over_the_elements(lengths, factor, seed):
    values = torch.randn(sum(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    expected = []
    for row in values.split(lengths):
        running, backwards = 0.0, []
        for value in reversed(row.tolist()):
            running = value + factor * running
            backwards.append(running)
        expected += backwards[::-1]
    sums = discounted_sums(values, torch.tensor(lengths, dtype=torch.int64), factor)
    assert sums.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_a_row_of_more_than_a_block_of_blocks_is_summed_to_its_end():
    length = BLOCK * BLOCK + BLOCK + 1
    sums = discounted_sums(torch.ones(length), torch.tensor([length]), 1.0)
    assert torch.equal(sums, torch.arange(length, 0, -1).float())


def test_strong_discounts_over_long_rows_neither_overflow_nor_vanish():
    length = 5000
    sums = discounted_sums(torch.ones(length), torch.tensor([length]), 0.5)
    assert sums[0] == 2
    assert sums.isfinite().all()


def test_the_element_after_a_rows_last_is_0():
    assert following(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 3, 0, 1, 0])).tolist() == [2, 3, 0, 0]

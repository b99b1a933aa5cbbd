import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hybridrl.core.required import required
from hybridrl.core.training.packing import (
    MicroBatchBudget,
    PackedRows,
    balance,
    lay_out,
    plan,
    reassemble,
    separate_rows,
)

LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=25)
RANKS = st.integers(1, 5)
BUDGETS = st.builds(MicroBatchBudget, st.integers(1, 60), st.none() | st.integers(1, 4), st.booleans())


def test_rows_go_longest_first_to_the_rank_with_the_least_work():
    # 9 to rank 0, 7 to rank 1, 4 to rank 1 (11), 3 to rank 0 (12).
    assert balance(range(4), [3, 9, 4, 7], ranks=2) == [[1, 0], [3, 2]]


def test_rows_are_exchanged_where_the_least_work_so_far_is_not_enough():
    # Longest first is 3 + 2 + 2 and 3 + 2.
    lengths = [3, 3, 2, 2, 2]
    assert sums(balance(range(5), lengths, ranks=2), np.array(lengths)) == [6, 6]


PLANS = {
    # Rank 0 has 9 and 3 tokens, which do not fit into 11 together; rank 1 has 7 and 4, which would.
    "a rank that needs fewer spreads its rows": ([3, 9, 4, 7], 2, MicroBatchBudget(11), [[[1], [0]], [[3], [2]]]),
    # 5 + 4 + 3 would fill a micro-batch of 12, and leave 3 + 3.
    "nearly equal rather than full": ([3, 3, 3, 4, 5], 1, MicroBatchBudget(12), [[[4, 1], [3, 0, 2]]]),
    # 7 and 4 take 14 tokens when padded, 4 and 3 take 8.
    "padded rows count as the longest": ([7, 4, 3], 1, MicroBatchBudget(11, padded=True), [[[0], [1, 2]]]),
    "a number of rows": ([5, 9, 7, 8, 6], 1, MicroBatchBudget(1, rows=2), [[[1, 3], [2, 4], [0]]]),
    "a row longer than the budget is alone": ([3, 50, 3], 1, MicroBatchBudget(10), [[[1], [0, 2]]]),
    "ranks without a row": ([5, 6], 3, MicroBatchBudget(10), [[[1]], [[0]], [[]]]),
}


@pytest.mark.parametrize("case", PLANS)
def test_micro_batches_of_each_rank(case):
    lengths, ranks, budget, expected = PLANS[case]
    assert plan(lengths, ranks, budget) == expected


def test_one_micro_batch_more_than_the_sum_allows_is_tried_before_two_more():
    # 20 tokens would fill two, but neither 6 has a 4 to go with.
    assert len(plan([6, 6, 3, 3, 2], 1, MicroBatchBudget(10))[0]) == 3


def test_only_the_rows_named_are_planned():
    assert plan([3, 9, 4, 7], 1, MicroBatchBudget(100), rows=[2, 0]) == [[[2, 0]]]


@given(LENGTHS, RANKS, BUDGETS, st.data())
def test_every_row_is_in_exactly_one_micro_batch_and_all_ranks_have_the_same_number(lengths, ranks, budget, data):
    rows = data.draw(st.none() | st.sets(st.integers(0, len(lengths) - 1)).map(sorted))
    shares = plan(lengths, ranks, budget, rows)
    planned = [row for micro_batches in shares for rows_ in micro_batches for row in rows_]
    assert sorted(planned) == (list(range(len(lengths))) if rows is None else rows)
    assert len(shares) == ranks
    assert len({len(micro_batches) for micro_batches in shares}) == 1


@given(LENGTHS, RANKS, BUDGETS)
def test_only_a_single_row_exceeds_the_budget(lengths, ranks, budget):
    for rows in (rows for micro_batches in plan(lengths, ranks, budget) for rows in micro_batches if rows):
        if budget.rows is not None:
            assert len(rows) <= budget.rows
        elif len(rows) > 1:
            used = [lengths[row] for row in rows]
            assert (max(used) * len(used) if budget.padded else sum(used)) <= budget.tokens


@given(LENGTHS, RANKS)
def test_no_rank_is_further_from_the_mean_than_the_longest_row(lengths, ranks):
    loads = [sum(lengths[row] for row in share) for share in balance(range(len(lengths)), lengths, ranks)]
    assert all(abs(load - sum(lengths) / ranks) <= max(lengths) for load in loads)


def sums(shares, lengths) -> list[int]:
    return [sum(int(lengths[row]) for row in share) for share in shares]


# Lengths of responses: a heavy tail, uniform, and with a mean of about 1,000.
DRAWN = {
    "log-normal": lambda draw, count: np.clip(draw.lognormal(5.7, 1.1, count), 1, 4096),
    "uniform": lambda draw, count: draw.integers(1, 2049, count),
    "gamma": lambda draw, count: np.clip(draw.gamma(4, 250, count), 20, 4096),
}
SHAPES = st.sampled_from(list(DRAWN))


def drawn(shape: str, count: int, seed: int) -> np.ndarray:
    return DRAWN[shape](np.random.default_rng(seed), count).astype(np.int64)


@given(SHAPES, st.integers(2, 64), st.integers(0, 10**6))
def test_no_rank_has_a_thousandth_more_than_the_mean_if_each_has_many_rows(shape, ranks, seed):
    lengths = drawn(shape, 100 * ranks, seed)
    assert max(sums(balance(range(len(lengths)), lengths, ranks), lengths)) <= 1.001 * lengths.sum() / ranks


@given(SHAPES, st.integers(300, 1500), st.integers(0, 10**6), st.none() | st.integers(0, 64))
def test_rows_fit_into_as_few_micro_batches_as_their_sum_allows_even_without_slack(shape, count, seed, spare):
    lengths = drawn(shape, count, seed)
    fewest = -(-int(lengths.sum()) // 16384)
    if spare is not None:  # longer rows, so that all micro-batches together have this many spare tokens
        missing = max(fewest * 16384 - spare - int(lengths.sum()), 0)
        lengths += missing // count + (np.arange(count) < missing % count)
    micro_batches = plan(lengths, 1, MicroBatchBudget(16384))[0]
    assert len(micro_batches) == fewest
    assert max(sums(micro_batches, lengths)) <= 16384


@pytest.mark.parametrize(("length", "expected"), [(9000, 40), (6000, 20), (16384, 40), (16385, 40), (5, 1)])
def test_rows_of_one_length_fill_each_micro_batch(length, expected):
    assert len(plan([length] * 40, 1, MicroBatchBudget(16384))[0]) == expected


def test_rows_of_which_few_fit_together_take_nearly_the_fewest_micro_batches():
    # 9000 goes with nothing, 7500 goes with another: 100 micro-batches and 50.
    assert 150 <= len(plan([9000, 7500] * 100, 1, MicroBatchBudget(16384))[0]) <= 153


@pytest.fixture
def two_rows(make_batch):
    """100 | 0 1 and 101 102 103 | 2."""
    return make_batch([2, 1], prompts=[1, 3])


def test_rows_are_packed_into_one_sequence(two_rows):
    inputs = lay_out(two_rows, padded=False)
    assert inputs.input_ids.tolist() == [[100, 0, 1, 101, 102, 103, 2]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert required(inputs.packed).boundaries.tolist() == [0, 3, 7]
    assert required(inputs.packed).boundaries.dtype == torch.int32
    assert required(inputs.packed).lengths == (3, 4)


def test_or_padded_on_the_right(two_rows):
    inputs = lay_out(two_rows, padded=True)
    assert inputs.input_ids.tolist() == [[100, 0, 1, 0], [101, 102, 103, 2]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert inputs.packed is None


@pytest.mark.parametrize(("padded", "predictors"), [(False, [0, 1, 5]), (True, [0, 1, 6])])
def test_each_response_token_is_predicted_by_the_one_before_it(two_rows, padded, predictors):
    inputs = lay_out(two_rows, padded)
    assert inputs.predictors.tolist() == predictors
    assert inputs.targets.tolist() == [0, 1, 2]


def test_the_experts_of_each_token_lie_where_it_does(two_rows):
    two_rows.routes = torch.arange(14, dtype=torch.int16).view(7, 1, 2)
    assert required(lay_out(two_rows, padded=False).routes).tolist() == two_rows.routes.tolist()
    padded = required(lay_out(two_rows, padded=True).routes)
    assert padded[:, 0].tolist() == [[0, 1], [2, 3], [4, 5], [-1, -1], [6, 7], [8, 9], [10, 11], [12, 13]]
    assert padded.dtype == torch.int16


def test_moving_inputs_moves_every_tensor(two_rows):
    two_rows.routes = torch.zeros(7, 1, 2, dtype=torch.int16)
    for padded in (False, True):
        moved = lay_out(two_rows, padded).to(torch.device("meta"))
        assert all(value.is_meta for value in vars(moved).values() if isinstance(value, torch.Tensor))
        assert padded or required(moved.packed).boundaries.is_meta


@given(LENGTHS, RANKS, BUDGETS)
def test_results_come_back_in_the_order_of_the_batch(make_batch, lengths, ranks, budget):
    batch = make_batch(lengths)
    rows = [[row for part in micro_batches for row in part] for micro_batches in plan(lengths, ranks, budget)]
    actual = [batch.select(own).response_ids.numpy() for own in rows]
    assert torch.equal(reassemble(actual, rows, batch.response_lengths), batch.response_ids)


def test_results_that_lack_a_rank_are_an_error_and_no_shorter_result():
    with pytest.raises(ValueError, match="longer"):
        reassemble([np.array([1.0, 2.0])], [[0], [1]], torch.tensor([2, 1]))


class RunningSum(nn.Module):
    """Mixes neighbouring tokens without attention, and is recognised by its convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 1)

    def forward(self, hidden: Tensor, mask: Tensor | None = None, *, packed: PackedRows | None = None) -> Tensor:
        return hidden.cumsum(1)


def test_a_layer_with_a_convolution_computes_packed_rows_one_by_one():
    layer, values, rows = RunningSum(), torch.arange(1.0, 6).view(1, 5, 1), PackedRows.of([2, 3])
    assert layer(values, packed=rows).flatten().tolist() == [1, 3, 6, 10, 15]
    separate_rows(layer)
    assert layer(values, packed=rows).flatten().tolist() == [1, 3, 3, 7, 12]
    # Padded rows, a mask, and a slice of tokens, which does not consist of rows.
    slices = PackedRows.of([2, 3], group=object())
    for options in ({}, {"mask": values}, {"packed": slices}):
        assert layer(values, **options).flatten().tolist() == [1, 3, 6, 10, 15]
    assert layer(values, values, packed=rows).flatten().tolist() == [1, 3, 6, 10, 15]

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.core.batch import token_rows
from hybridrl.core.carried import PICTURES
from hybridrl.core.pictures import PixelRule
from hybridrl.core.training.planning import MicroBatchBudget, Pieces, balance, plan, reassemble
from hybridrl.core.training.vision import VisionConfig, work_of
from hybridrl.required import required

LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=25)
RANKS = st.integers(1, 5)
BUDGETS = st.builds(MicroBatchBudget, st.integers(1, 60), st.none() | st.integers(1, 4), st.booleans())


def shares_of(lengths, ranks: int) -> list[list[int]]:
    return [share.tolist() for share in balance(np.asarray(lengths), ranks)]


def test_rows_go_longest_first_to_the_rank_with_the_least_work():
    # 9 to rank 0, 7 to rank 1, 4 to rank 1 (11), 3 to rank 0 (12).
    assert shares_of([3, 9, 4, 7], 2) == [[1, 0], [3, 2]]


def test_rows_are_exchanged_where_the_least_work_so_far_is_not_enough():
    # Longest first is 3 + 2 + 2 and 3 + 2.
    lengths = [3, 3, 2, 2, 2]
    assert sums(shares_of(lengths, 2), np.array(lengths)) == [6, 6]


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
    assert plan(Pieces.single(lengths), ranks, budget) == expected


def test_tokens_of_pictures_count_as_the_work_of_the_tower_too():
    # Placeholders have the id 9: none, four of which one is in the response, and two.
    rows = token_rows([[1, 2, 3, 4, 5, 6], [9, 9, 9, 1, 9, 6], [9, 9]], slice(3, None))
    rows = replace(rows, prompt_lengths=torch.tensor([3, 3, 2]), response_lengths=torch.tensor([3, 3, 0]))
    vision = VisionConfig(PixelRule(), {}, [], placeholder=9, weight=0.75)
    seeing = replace(rows, carried={PICTURES: rows.group})
    assert required(work_of(vision, seeing)).tolist() == [6, 9, 4]
    assert required(work_of(vision, seeing, np.array([2, 4, 0]))).tolist() == [2, 6, 0]
    assert work_of(None, seeing) is None and work_of(vision, rows) is None
    assert plan(Pieces.single([6, 6, 2, 1], work=np.array([6, 9, 2, 1])), 2, MicroBatchBudget(100)) == [
        [[1]],
        [[0, 2, 3]],
    ]


def test_one_micro_batch_more_than_the_sum_allows_is_tried_before_two_more():
    # 20 tokens would fill two, but neither 6 has a 4 to go with.
    assert len(plan(Pieces.single([6, 6, 3, 3, 2]), 1, MicroBatchBudget(10))[0]) == 3


def test_only_the_rows_named_are_planned():
    assert plan(Pieces.single([3, 9, 4, 7], [2, 0]), 1, MicroBatchBudget(100)) == [[[2, 0]]]


@given(LENGTHS, RANKS, BUDGETS, st.data())
def test_every_row_is_in_exactly_one_micro_batch_and_all_ranks_have_the_same_number(lengths, ranks, budget, data):
    rows = data.draw(st.none() | st.sets(st.integers(0, len(lengths) - 1)).map(sorted))
    shares = plan(Pieces.single(lengths, rows), ranks, budget)
    planned = [row for micro_batches in shares for rows_ in micro_batches for row in rows_]
    assert sorted(planned) == (list(range(len(lengths))) if rows is None else rows)
    assert len(shares) == ranks
    assert len({len(micro_batches) for micro_batches in shares}) == 1


@given(LENGTHS, RANKS, BUDGETS)
def test_only_a_single_row_exceeds_the_budget(lengths, ranks, budget):
    for rows in (
        rows for micro_batches in plan(Pieces.single(lengths), ranks, budget) for rows in micro_batches if rows
    ):
        if budget.rows is not None:
            assert len(rows) <= budget.rows
        elif len(rows) > 1:
            used = [lengths[row] for row in rows]
            assert (max(used) * len(used) if budget.padded else sum(used)) <= budget.tokens


@given(LENGTHS, RANKS)
def test_no_rank_is_further_from_the_mean_than_the_longest_row(lengths, ranks):
    loads = [sum(lengths[row] for row in share) for share in shares_of(lengths, ranks)]
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
    assert max(sums(shares_of(lengths, ranks), lengths)) <= 1.001 * lengths.sum() / ranks


@given(SHAPES, st.integers(300, 1500), st.integers(0, 10**6), st.none() | st.integers(0, 64))
def test_rows_fit_into_as_few_micro_batches_as_their_sum_allows_even_without_slack(shape, count, seed, spare):
    lengths = drawn(shape, count, seed)
    fewest = -(-int(lengths.sum()) // 16384)
    if spare is not None:  # longer rows, so that all micro-batches together have this many spare tokens
        missing = max(fewest * 16384 - spare - int(lengths.sum()), 0)
        lengths += missing // count + (np.arange(count) < missing % count)
    micro_batches = plan(Pieces.single(lengths), 1, MicroBatchBudget(16384))[0]
    assert len(micro_batches) == fewest
    assert max(sums(micro_batches, lengths)) <= 16384


@pytest.mark.parametrize(("length", "expected"), [(9000, 40), (6000, 20), (16384, 40), (16385, 40), (5, 1)])
def test_rows_of_one_length_fill_each_micro_batch(length, expected):
    assert len(plan(Pieces.single([length] * 40), 1, MicroBatchBudget(16384))[0]) == expected


def test_rows_of_which_few_fit_together_take_nearly_the_fewest_micro_batches():
    # 9000 goes with nothing, 7500 goes with another: 100 micro-batches and 50.
    assert 150 <= len(plan(Pieces.single([9000, 7500] * 100), 1, MicroBatchBudget(16384))[0]) <= 153


@given(LENGTHS, RANKS, BUDGETS)
def test_results_come_back_in_the_order_of_the_batch(make_batch, lengths, ranks, budget):
    batch = make_batch(lengths)
    rows = [
        [row for part in micro_batches for row in part] for micro_batches in plan(Pieces.single(lengths), ranks, budget)
    ]
    actual = [batch.select(own).response_ids.numpy() for own in rows]
    assert torch.equal(reassemble(actual, rows, batch.response_lengths), batch.response_ids)


def test_results_that_lack_a_rank_are_an_error_and_no_shorter_result():
    with pytest.raises(ValueError, match="longer"):
        reassemble([np.array([1.0, 2.0])], [[0], [1]], torch.tensor([2, 1]))


def pairs(lengths: list[int], work: list[int] | None = None) -> Pieces:
    """Rows 0 and 1, 2 and 3, ...: a pair's memory is its tokens, and so is its work unless that is given."""
    memory = np.array(lengths).reshape(-1, 2).sum(axis=1)
    return Pieces(
        np.arange(len(lengths)), 2 * np.arange(1, len(memory) + 1), memory if work is None else np.array(work), memory
    )


def test_a_piece_is_never_cut():
    # Pairs of 8, 5 and 9 tokens: 9 is a rank's, 8 and 5 the other's, and do not fit into 10 together.
    assert plan(pairs([4, 4, 2, 3, 5, 4]), 2, MicroBatchBudget(10)) == [[[4, 5], []], [[0, 1], [2, 3]]]


def test_ranks_are_balanced_by_work_and_micro_batches_filled_by_memory():
    # By memory the rows of 9 and 2 would be one rank's; by work the last is as much as all others.
    pieces = Pieces(np.arange(4), np.arange(1, 5), work=np.array([1, 1, 1, 3]), memory=np.array([9, 5, 4, 2]))
    assert plan(pieces, 2, MicroBatchBudget(9)) == [[[3], []], [[0], [1, 2]]]


@given(st.lists(st.integers(1, 20), min_size=2, max_size=24).filter(lambda rows: len(rows) % 2 == 0), RANKS, BUDGETS)
def test_pairs_stay_together_within_any_budget(lengths, ranks, budget):
    shares = plan(pairs(lengths), ranks, budget)
    found = [rows for micro_batches in shares for rows in micro_batches]
    assert sorted(row for rows in found for row in rows) == list(range(len(lengths)))
    for rows in found:
        assert all(rows[place + 1] == rows[place] + 1 and rows[place] % 2 == 0 for place in range(0, len(rows), 2))
        if len(rows) > 2 and budget.rows is not None:
            assert len(rows) <= budget.rows
        elif len(rows) > 2 and not budget.padded:
            assert sum(lengths[row] for row in rows) <= budget.tokens


def test_a_pair_counts_by_the_tokens_of_both_rows_and_padded_by_the_longer_one():
    lengths = [4, 4, 2, 3, 5, 4]
    for padded, memory in ((False, [8, 5, 9]), (True, [8, 6, 10])):
        pieces = Pieces.single(lengths, size=2, padded=padded)
        assert (pieces.work.tolist(), pieces.memory.tolist(), pieces.ends.tolist()) == ([8, 5, 9], memory, [2, 4, 6])
        assert pieces.rows_of(np.array([2, 0])) == [4, 5, 0, 1]

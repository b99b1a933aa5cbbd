import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.training.packing import Budget, balance, lay_out, plan, reassemble

LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=25)
RANKS = st.integers(1, 5)
BUDGETS = st.builds(Budget, st.integers(1, 60), st.none() | st.integers(1, 4), st.booleans())


def test_rows_go_longest_first_to_the_rank_with_the_least_work():
    # 9 to rank 0, 7 to rank 1, 4 to rank 1 (11), 3 to rank 0 (12).
    assert balance(range(4), [3, 9, 4, 7], ranks=2) == [[1, 0], [3, 2]]


def test_passes_fill_the_budget_and_ranks_with_fewer_passes_get_empty_ones():
    # Rank 0 has 9 and 3 tokens, which do not fit into 11 together; rank 1 has 7 and 4, which do.
    assert plan([3, 9, 4, 7], 2, Budget(11)) == [[[1], [0]], [[3, 2], []]]


def test_padded_rows_count_as_long_as_the_longest_of_their_pass():
    # 7 and 4 take 14 tokens of a rectangle, 4 and 3 take 8.
    assert plan([7, 4, 3], 1, Budget(11, padded=True)) == [[[0], [1, 2]]]


def test_a_fixed_number_of_rows_stands_instead_of_a_number_of_tokens():
    assert plan([5, 9, 7, 8, 6], 1, Budget(1, rows=2)) == [[[1, 3], [2, 4], [0]]]


def test_a_row_longer_than_the_budget_goes_alone():
    assert plan([3, 50, 3], 1, Budget(10)) == [[[1], [0, 2]]]


def test_only_the_rows_named_are_planned():
    assert plan([3, 9, 4, 7], 1, Budget(100), rows=[2, 0]) == [[[2, 0]]]


def test_ranks_without_a_row_keep_step_with_the_others():
    assert plan([5, 6], 3, Budget(10)) == [[[1]], [[0]], [[]]]


@given(LENGTHS, RANKS, BUDGETS, st.data())
def test_every_row_is_in_exactly_one_pass_and_all_ranks_make_as_many(lengths, ranks, budget, data):
    rows = data.draw(st.none() | st.sets(st.integers(0, len(lengths) - 1)).map(sorted))
    shares = plan(lengths, ranks, budget, rows)
    planned = [row for passes in shares for rows_ in passes for row in rows_]
    assert sorted(planned) == (list(range(len(lengths))) if rows is None else rows)
    assert len(shares) == ranks
    assert len({len(passes) for passes in shares}) == 1


@given(LENGTHS, RANKS, BUDGETS)
def test_no_pass_is_over_the_budget_but_for_a_single_row(lengths, ranks, budget):
    for rows in (rows for passes in plan(lengths, ranks, budget) for rows in passes if rows):
        if budget.rows is not None:
            assert len(rows) <= budget.rows
        elif len(rows) > 1:
            used = [lengths[row] for row in rows]
            assert (max(used) * len(used) if budget.padded else sum(used)) <= budget.tokens


@given(LENGTHS, RANKS)
def test_no_rank_is_further_from_the_mean_than_the_longest_row(lengths, ranks):
    loads = [sum(lengths[row] for row in share) for share in balance(range(len(lengths)), lengths, ranks)]
    assert all(abs(load - sum(lengths) / ranks) <= max(lengths) for load in loads)


@pytest.fixture
def two_rows(make_batch):
    """100 | 0 1 and 101 102 103 | 2."""
    return make_batch([2, 1], prompts=[1, 3])


def test_rows_lie_end_to_end_in_one_line(two_rows):
    inputs = lay_out(two_rows, padded=False)
    assert inputs.input_ids.tolist() == [[100, 0, 1, 101, 102, 103, 2]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert inputs.boundaries.tolist() == [0, 3, 7]
    assert inputs.boundaries.dtype == torch.int32
    assert inputs.longest == 4


def test_or_one_a_line_padded_on_the_right(two_rows):
    inputs = lay_out(two_rows, padded=True)
    assert inputs.input_ids.tolist() == [[100, 0, 1, 0], [101, 102, 103, 2]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert inputs.boundaries is None


@pytest.mark.parametrize(("padded", "predictors"), [(False, [0, 1, 5]), (True, [0, 1, 6])])
def test_each_response_token_is_predicted_by_the_one_before_it(two_rows, padded, predictors):
    inputs = lay_out(two_rows, padded)
    assert inputs.predictors.tolist() == predictors
    assert inputs.targets.tolist() == [0, 1, 2]


def test_moving_inputs_moves_every_tensor(two_rows):
    for padded in (False, True):
        moved = lay_out(two_rows, padded).to(torch.device("meta"))
        assert all(value.is_meta for value in vars(moved).values() if isinstance(value, torch.Tensor))
        assert moved.longest == 4


@given(LENGTHS, RANKS, BUDGETS)
def test_results_come_back_in_the_order_of_the_batch(make_batch, lengths, ranks, budget):
    batch = make_batch(lengths)
    rows = [[row for part in passes for row in part] for passes in plan(lengths, ranks, budget)]
    found = [batch.select(own).response_ids for own in rows]
    assert torch.equal(reassemble(found, rows, batch.response_lengths), batch.response_ids)

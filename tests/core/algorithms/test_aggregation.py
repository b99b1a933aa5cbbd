import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.core.algorithms.objective import Totals, token_weights

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
SCALE = 4.0
ROWS = st.lists(st.lists(st.booleans(), min_size=1, max_size=5), min_size=1, max_size=8)


def masked(make_batch, rows):
    return make_batch([len(row) for row in rows], response_mask=[token for row in rows for token in row])


def reference(loss, rows, mode):
    """The loss as the papers write it, token by token: rows of (loss, written) -> one number."""
    values = iter(loss.tolist())
    written = [[value for value, mark in [(next(values), mark) for mark in row] if mark] for row in rows]
    written = [row for row in written if row]
    total = sum(map(sum, written))
    return {
        "token-mean": total / sum(map(len, written)),
        "seq-mean-token-sum": total / len(written),
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in written) / len(written),
        "token-sum": total,
        "seq-mean-token-sum-norm": total / len(written) / SCALE,
    }[mode]


@pytest.fixture
def three_rows(make_batch):
    """The policy wrote 2 of 3 tokens, the only one, and none of 2."""
    return masked(make_batch, [[True, False, True], [True], [False, False]])


def test_totals_count_written_tokens_and_rows_that_have_one(three_rows):
    assert Totals.of(three_rows) == Totals(tokens=3, rows=2)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [1 / 3, 0, 1 / 3, 1 / 3, 0, 0]),
        ("seq-mean-token-sum", [1 / 2, 0, 1 / 2, 1 / 2, 0, 0]),
        ("seq-mean-token-mean", [1 / 4, 0, 1 / 4, 1 / 2, 0, 0]),
        ("token-sum", [1, 0, 1, 1, 0, 0]),
        ("seq-mean-token-sum-norm", [1 / 8, 0, 1 / 8, 1 / 8, 0, 0]),
    ],
)
def test_the_weight_of_each_token(three_rows, mode, expected):
    assert token_weights(three_rows, mode, Totals.of(three_rows), SCALE).tolist() == pytest.approx(expected)


def test_the_divisor_is_that_of_the_totals_and_not_of_the_rows_at_hand(three_rows):
    weights = token_weights(three_rows.select([1]), "token-mean", Totals(tokens=10, rows=5))
    assert weights.tolist() == pytest.approx([0.1])


@pytest.mark.parametrize("mode", MODES)
def test_where_nothing_was_written_every_weight_is_zero(make_batch, mode):
    batch = masked(make_batch, [[False, False], [False]])
    assert token_weights(batch, mode, Totals.of(batch), SCALE).tolist() == [0, 0, 0]


@pytest.mark.parametrize("mode", MODES)
@given(rows=ROWS.filter(lambda rows: any(map(any, rows))))
def test_the_weighted_sum_is_the_papers_formula(make_batch, mode, rows):
    batch = masked(make_batch, rows)
    loss = torch.arange(1.0, len(batch.response_ids) + 1, dtype=torch.float64)
    weights = token_weights(batch, mode, Totals.of(batch), SCALE)
    assert (loss * weights).sum().item() == pytest.approx(reference(loss, rows, mode), rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
@given(rows=ROWS, data=st.data())
def test_passes_add_up_to_the_whole_however_the_rows_are_cut(make_batch, mode, rows, data):
    batch = masked(make_batch, rows)
    totals, loss = Totals.of(batch), torch.arange(1.0, len(batch.response_ids) + 1)
    batch.values = loss
    pass_of = data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    parts = [batch.select([row for row, number in enumerate(pass_of) if number == n]) for n in range(4)]
    whole = (loss * token_weights(batch, mode, totals, SCALE)).sum()
    sums = [(part.values * token_weights(part, mode, totals, SCALE)).sum() for part in parts if len(part)]
    assert torch.stack(sums).sum().item() == pytest.approx(whole.item(), rel=1e-5)

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.core.batch import Batch, pack

ROUTES = torch.arange(12, dtype=torch.int16).view(12, 1, 1)
LENGTHS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=8)


@pytest.fixture
def three_rows(make_batch) -> Batch:
    """Prompts [100], [101 102 103], [104 105]; responses [0 1], [2], [3 4 5]; one expert of each token, in one layer,
    which counts up."""
    more = {"rewards": [0.0, 1.0, 0.5], "values": [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]}
    return make_batch([2, 1, 3], prompts=[1, 3, 2], **more, carried={"routes": ROUTES})


def same(left: Batch, right: Batch) -> bool:
    pairs = zip(left.filled(), right.filled(), strict=True)
    return all(name == other and torch.equal(a, b) for (name, _, a), (other, _, b) in pairs)


def test_select_returns_rows_in_the_requested_order(three_rows):
    chosen = three_rows.select([2, 0])
    assert len(chosen) == 2
    assert chosen.prompt_ids.tolist() == [104, 105, 100]
    assert chosen.response_ids.tolist() == [3, 4, 5, 0, 1]
    assert chosen.prompt_lengths.tolist() == [2, 1]
    assert chosen.response_lengths.tolist() == [3, 2]
    assert chosen.rewards.tolist() == [0.5, 0.0]
    assert chosen.values.tolist() == pytest.approx([0.3, 0.4, 0.5, 0.0, 0.1])
    assert chosen.carried["routes"].flatten().tolist() == [7, 8, 9, 10, 11, 0, 1, 2]
    assert chosen.position.tolist() == [2, 0]
    assert same(three_rows.select(torch.tensor([2, 0])), chosen)


def test_select_can_repeat_a_row_or_take_none_and_keeps_empty_fields_empty(three_rows):
    chosen, empty = three_rows.select([1, 1]), three_rows.select([])
    assert chosen.response_ids.tolist() == [2, 2]
    assert chosen.prompt_ids.tolist() == [101, 102, 103, 101, 102, 103]
    assert chosen.advantages is None
    assert (len(empty), empty.response_ids.numel(), empty.rewards.numel()) == (0, 0, 0)


def test_only_keeps_required_fields_and_those_named(three_rows):
    kept = three_rows.only("rewards")
    assert kept.rewards.tolist() == [0.0, 1.0, 0.5]
    assert kept.response_ids.tolist() == three_rows.response_ids.tolist()
    assert kept.values is kept.response_mask is None and kept.carried == {}
    assert three_rows.values is not None


def test_per_row_sums_the_values_of_each_response(three_rows):
    assert three_rows.per_row(torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])).tolist() == [3.0, 4.0, 56.0]


def test_the_mean_over_trained_tokens_excludes_others(make_batch):
    batch = make_batch([3, 2, 1], response_mask=[True, False, True, False, False, True])
    assert batch.trained_mean(torch.tensor([1.0, 9.0, 3.0, 9.0, 9.0, 7.0])).tolist() == [2.0, 0.0, 7.0]


def test_padded_fills_rows_on_the_right(three_rows):
    rectangle = three_rows.padded(three_rows.response_ids, fill=-1)
    assert rectangle.tolist() == [[0, 1, -1], [2, -1, -1], [3, 4, 5]]


def test_the_row_and_the_last_token_of_each_response(three_rows):
    assert three_rows.response_row.tolist() == [0, 0, 1, 2, 2, 2]
    assert three_rows.last_tokens.tolist() == [1, 2, 5]
    assert three_rows.lengths.tolist() == [3, 4, 5]


def test_moving_to_a_device_moves_every_filled_field(three_rows):
    moved = three_rows.map(lambda value: value.to("meta"))
    filled = [value for _, _, value in moved.filled()]
    assert len(filled) == 11 and all(value.is_meta for value in filled)


def test_pack_flattens_lists_and_arrays_and_keeps_their_lengths():
    values, lengths = pack([[3, 1], [], [4]], torch.int64)
    assert (values.tolist(), lengths.tolist()) == ([3, 1, 4], [2, 0, 1])
    assert (values.dtype, lengths.dtype) == (torch.int64, torch.int64)
    values, lengths = pack([np.array([0.5], np.float32), np.array([1.5, 2.5], np.float32)], torch.float32)
    assert (values.tolist(), lengths.tolist()) == ([0.5, 1.5, 2.5], [1, 2])
    values, lengths = pack([], torch.int64)
    assert (values.tolist(), lengths.tolist(), values.dtype) == ([], [], torch.int64)


@given(LENGTHS, st.randoms())
def test_a_permutation_and_its_inverse_give_the_same_batch(make_batch, lengths, random):
    batch = make_batch([response for _, response in lengths], prompts=[prompt for prompt, _ in lengths])
    order = random.sample(range(len(batch)), len(batch))
    inverse = [order.index(row) for row in range(len(batch))]
    assert same(batch.select(order).select(inverse), batch)


@given(LENGTHS, st.data())
def test_the_padded_tensor_holds_each_response_and_nothing_else(make_batch, lengths, data):
    batch = make_batch([response for _, response in lengths], prompts=[prompt for prompt, _ in lengths])
    rectangle = batch.padded(batch.response_ids, fill=-1)
    row = data.draw(st.integers(0, len(batch) - 1))
    assert rectangle[row][rectangle[row] >= 0].tolist() == batch.select([row]).response_ids.tolist()


def test_a_tensordict_has_the_same_values_by_row_and_without_a_copy(three_rows):
    content = three_rows.to_tensordict()
    assert content.batch_size == (3,)
    assert [row.tolist() for row in content["response_ids"].unbind()] == [[0, 1], [2], [3, 4, 5]]
    assert [row.tolist() for row in content["prompt_ids"].unbind()] == [[100], [101, 102, 103], [104, 105]]
    assert content["rewards"].tolist() == [0.0, 1.0, 0.5]
    assert "advantages" not in content
    assert [row.flatten().tolist() for row in content["routes"].unbind()] == [
        [0, 1, 2],
        [3, 4, 5, 6],
        [7, 8, 9, 10, 11],
    ]
    assert content[2]["response_ids"].tolist() == [3, 4, 5]
    assert content["values"].values().data_ptr() == three_rows.values.data_ptr()


def test_a_tensordict_and_back_is_the_same_batch_in_any_order_of_rows(three_rows):
    back = Batch.from_tensordict(three_rows.to_tensordict())
    assert same(back, three_rows) and back.advantages is None
    assert all(one[2].dtype == other[2].dtype for one, other in zip(back.filled(), three_rows.filled(), strict=True))
    content = three_rows.to_tensordict()
    content["not a field"] = torch.zeros(3)
    assert same(Batch.from_tensordict(content[[2, 0]]), three_rows.select([2, 0]))

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from hybridrl.core.training.packing import MicroBatch, PackedRows, pack_rows, separate_rows, to_device
from hybridrl.required import required


@pytest.fixture
def two_rows(make_batch):
    """100 | 0 1 and 101 102 103 | 2."""
    return make_batch([2, 1], prompts=[1, 3])


def test_rows_are_packed_into_one_sequence(two_rows):
    inputs = pack_rows(two_rows, padded=False)
    assert inputs.input_ids.tolist() == [[100, 0, 1, 101, 102, 103, 2]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert required(inputs.packed).boundaries.tolist() == [0, 3, 7]
    assert required(inputs.packed).boundaries.dtype == torch.int32
    assert required(inputs.packed).lengths == (3, 4)


def test_or_padded_on_the_right(two_rows):
    inputs = pack_rows(two_rows, padded=True)
    assert inputs.input_ids.tolist() == [[100, 0, 1, 0], [101, 102, 103, 2]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert inputs.packed is None


@pytest.mark.parametrize(("padded", "predictors"), [(False, [0, 1, 5]), (True, [0, 1, 6])])
def test_each_response_token_is_predicted_by_the_one_before_it(two_rows, padded, predictors):
    inputs = pack_rows(two_rows, padded)
    assert inputs.predictors.tolist() == predictors
    assert inputs.targets.tolist() == [0, 1, 2]


def test_the_experts_of_each_token_lie_where_it_does(two_rows):
    routes = two_rows.carried["routes"] = torch.arange(14, dtype=torch.int16).view(7, 1, 2)
    assert pack_rows(two_rows, padded=False).carried["routes"].tolist() == routes.tolist()
    padded = pack_rows(two_rows, padded=True).carried["routes"]
    assert padded[:, 0].tolist() == [[0, 1], [2, 3], [4, 5], [-1, -1], [6, 7], [8, 9], [10, 11], [12, 13]]
    assert padded.dtype == torch.int16


def test_micro_batches_keep_their_values_in_one_copy_and_a_tensor_of_several_is_sent_once(two_rows, monkeypatch):
    """With another place in host memory as the device."""
    rows = replace(two_rows, response_mask=torch.tensor([True, False, True]))
    inputs, sent = pack_rows(rows, padded=False), []
    parts = [
        MicroBatch(rows, inputs),
        MicroBatch(rows, replace(inputs, targets=inputs.targets + 1), {"reference": inputs}),
    ]

    class Device:
        type = "other"

    def moved(buffer: torch.Tensor, device: Device, **_: object) -> torch.Tensor:
        sent.append(buffer.numel())
        return buffer.clone()

    monkeypatch.setattr(torch.Tensor, "to", moved)
    again = to_device(parts, Device())
    monkeypatch.undo()
    for before, after in zip(parts, again, strict=True):
        values: list[list[torch.Tensor]] = [[], []]
        for part, tensors in zip((before, after), values, strict=True):
            part.map(lambda tensor, tensors=tensors: tensors.append(tensor) or tensor)
        assert len(values[0]) == len(values[1]) > 10
        for one, other in zip(*values, strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)
    assert again[1].others["reference"].targets.data_ptr() == again[0].inputs.targets.data_ptr()
    assert len(sent) == 1 and sent[0] <= 14 * 64, "each of 14 tensors, all small, takes the bytes of its alignment"


def test_moving_inputs_moves_every_tensor(two_rows):
    two_rows.carried["routes"] = torch.zeros(7, 1, 2, dtype=torch.int16)
    for padded in (False, True):
        moved = pack_rows(two_rows, padded).to(torch.device("meta"))
        values = *vars(moved).values(), moved.carried["routes"]
        assert all(value.is_meta for value in values if isinstance(value, torch.Tensor))
        assert padded or required(moved.packed).boundaries.is_meta


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

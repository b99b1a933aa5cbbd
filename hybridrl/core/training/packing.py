"""Rows laid out as the inputs of a model: packed into one sequence without padding, or padded to the longest."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hybridrl.core import device as devices
from hybridrl.core.batch import Batch, places
from hybridrl.core.carried import declared


@dataclass(frozen=True)
class PackedRows:
    """The boundaries of packed rows, for attention. The lengths are kept on the host: reading them from a GPU would
    make the host wait for it in every layer. Compiled layers read `longest` alone, a number that may vary, as lengths
    would become constants."""

    lengths: tuple[int, ...]
    longest: int
    boundaries: Tensor  # [rows + 1] int32, cumulative lengths
    group: ProcessGroup | None = None  # its ranks each hold a slice of the tokens

    @classmethod
    def of(cls, lengths: Sequence[int], group: ProcessGroup | None = None) -> "PackedRows":
        return cls(tuple(lengths), max(lengths), torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), group)


@dataclass(frozen=True)
class SequenceSlice:
    """This rank's slice of tokens that the ranks of a group share: its response tokens begin at `start` of `total`."""

    group: ProcessGroup
    start: int
    total: int


@dataclass(frozen=True)
class PictureInputs:
    """The distinct pictures of rows, one after another, and the feature that each placeholder of the rows reads."""

    pixels: Tensor  # [patches, values]
    grids: Tensor  # [pictures, 3] int64, in host memory: a tower reads it there
    taken: Tensor  # [placeholders] int64, in the order of the flattened input
    at: Tensor  # [placeholders] int64, their places in the flattened input; in host memory
    tower: Mapping[str, Any] = field(default_factory=dict)  # what the tower computes from grids, on its device

    def between(self, first: int, end: int) -> "PictureInputs":
        """Return the inputs for a slice of the flattened input, with all pictures."""
        inside = (self.at >= first) & (self.at < end)
        return replace(self, taken=self.taken[inside], at=self.at[inside] - first)


@dataclass
class ModelInputs:
    """Rows as a model expects them: packed into one sequence of T tokens, or padded on the right to [B, T].
    `predictors` are indices into the flattened input: the outputs there predict the response tokens, in row order.
    `carried` has the fields that a model reads; fields per token are in the order of the flattened input."""

    input_ids: Tensor  # [1, T] or [B, T]
    position_ids: Tensor  # the same shape; with pictures [axes, 1, T] or [axes, B, T]
    predictors: Tensor  # [response tokens]
    targets: Tensor  # [response tokens]
    packed: PackedRows | None  # None: padded
    carried: dict[str, Tensor] = field(default_factory=dict)
    slice: SequenceSlice | None = None  # set if the tokens are only a slice of the packed rows
    pictures: PictureInputs | None = None  # None if no row of the batch has a picture

    def map(self, function: Callable[[Tensor], Tensor]) -> "ModelInputs":
        """Apply a function to every tensor."""
        packed = self.packed and replace(self.packed, boundaries=function(self.packed.boundaries))
        own: dict[str, Any] = {name: function(item) for name, item in vars(self).items() if isinstance(item, Tensor)}
        carried = {name: function(value) for name, value in self.carried.items()}
        pictures = self.pictures
        if pictures is not None:
            tower = {key: function(each) if isinstance(each, Tensor) else each for key, each in pictures.tower.items()}
            moved = {name: function(getattr(pictures, name)) for name in ("pixels", "taken")}
            pictures = replace(pictures, tower=tower, **moved)
        return replace(self, **own, packed=packed, carried=carried, pictures=pictures)

    def to(self, device: torch.device) -> "ModelInputs":
        """Return the same inputs on a device; the host does not wait for the copy."""
        return to_device([self], device)[0]


@dataclass(frozen=True)
class MicroBatch:
    """Rows for a loss, and the inputs of the models that compute its outputs for them."""

    rows: Batch
    inputs: ModelInputs
    # Inputs of the models with which the loss compares the policy. One of them may be the teacher of these rows.
    others: Mapping[str, ModelInputs] = field(default_factory=dict)
    teacher: str = ""

    def map(self, function: Callable[[Tensor], Tensor]) -> "MicroBatch":
        """Apply a function to every tensor."""
        others = {name: inputs.map(function) for name, inputs in self.others.items()}
        return replace(self, rows=self.rows.map(function), inputs=self.inputs.map(function), others=others)


Part = TypeVar("Part", ModelInputs, MicroBatch)


def to_device(parts: Sequence[Part], device: torch.device) -> list[Part]:
    """Return these parts on a device, moved in one copy, for which the host does not wait."""
    if device.type == "cpu":
        return list(parts)
    tensors: dict[int, Tensor] = {}  # one that several parts have is sent once
    for part in parts:
        part.map(lambda tensor: tensors.setdefault(id(tensor), tensor))
    # Page-locked: a copy from other memory waits for all that runs on the device. Torch reuses it after the copy.
    staged = torch.empty(devices.room(tensors.values()), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for view, tensor in zip(devices.carve(staged, tensors.values()), tensors.values(), strict=True):
        view.copy_(tensor)
    moved = dict(zip(tensors, devices.carve(staged.to(device, non_blocking=True), tensors.values()), strict=True))
    return [part.map(lambda tensor: moved[id(tensor)]) for part in parts]


def pack_rows(batch: Batch, padded: bool, ahead: int = 1) -> ModelInputs:
    """Return the rows of a batch, prompt and response concatenated, as model inputs. The output for a response token is
    that at the token `ahead` places before it."""
    lengths = batch.lengths
    longest = int(lengths.max())
    rows = torch.arange(len(batch))
    starts = rows * longest if padded else lengths.cumsum(0) - lengths
    size = len(batch) * longest if padded else int(lengths.sum())
    ids = torch.zeros(size, dtype=torch.int64)
    ids[places(starts, batch.prompt_lengths)] = batch.prompt_ids.long()
    responses = places(starts + batch.prompt_lengths, batch.response_lengths)
    ids[responses] = targets = batch.response_ids.long()
    if padded:
        positions, packed = torch.arange(longest).repeat(len(batch)), None
    else:
        positions, packed = places(torch.zeros_like(lengths), lengths), PackedRows.of(lengths.tolist())
    shape = (len(batch), longest) if padded else (1, size)
    read = {name: value for name, value in batch.carried.items() if declared(name).enters}
    carried = {name: value for name, value in read.items() if declared(name).axis != "items"}  # see vision.py
    for name, value in carried.items():
        if padded and declared(name).axis == "token":
            empty = value.new_full((size, *value.shape[1:]), declared(name).absent)
            carried[name] = empty.index_copy_(0, places(starts, lengths), value)
    return ModelInputs(ids.view(shape), positions.view(shape), responses - ahead, targets, packed, carried)


def separate_rows(model: nn.Module) -> None:
    """Make layers that mix neighbouring tokens without attention compute packed rows one by one.

    Convolutions and recurrences would otherwise carry state from one row to the next; attention and all other layers
    still compute packed rows. The layers are recognised by a convolution among their children, which nearly all such
    families have; `model.packed_rows_interact` detects the others.
    """
    for module in model.modules():
        if any(isinstance(child, nn.Conv1d) for child in module.children()):
            module.forward = partial(_row_by_row, module.forward)


def _row_by_row(
    forward: Callable[..., Tensor],
    hidden_states: Tensor,  # [1, T, width] packed, or [B, T, width]
    *arguments: object,
    packed: PackedRows | None = None,
    **options: object,
) -> Tensor:
    sliced = packed is not None and packed.group is not None  # a slice does not consist of rows
    if packed is None or sliced or any(isinstance(value, Tensor) for value in arguments):
        return forward(hidden_states, *arguments, **options)
    rows = hidden_states.split(packed.lengths, dim=1)
    return torch.cat([forward(row, *arguments, **options) for row in rows], dim=1)

"""Rows laid out as the inputs of a model: packed into one sequence without padding, or padded to the longest. Packed
rows that begin alike have these tokens once.

Rows are sorted by their tokens. A row then shares with the one directly before it all that it shares with any before
it. So one number per row, `shared`, describes beginnings of any depth. Row i computes its tokens from `shared[i]` on,
and attends to all of its tokens; the first `shared[i]` of them are where the row before has them.

    rows, sorted          shared  computed            keys of the row
    s u A A A             0       s u A A A           0 1 2 3 4.
    s u A B               3       B                   0 1 2 5.
    s u C C v D           2       C C v D             0 1 6 7 8 9.

The last token of a language model's row is not computed: the head does not read its hidden state, and no later token
attends to it. Outputs and gradient are those of the rows alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup

from hybridrl.core import device as devices
from hybridrl.core.batch import Batch, places
from hybridrl.core.carried import CONTEXT, declared


@dataclass(frozen=True)
class Spans:
    """The boundaries of packed rows, for attention. The lengths are kept on the host: reading them from a GPU would
    make the host wait for it in every layer. Compiled layers read `longest` alone, a number that may vary, as lengths
    would become constants."""

    lengths: tuple[int, ...]
    longest: int
    boundaries: Tensor  # [rows + 1] int32, cumulative lengths

    @classmethod
    def of(cls, lengths: Sequence[int], **fields: Any) -> Self:
        boundaries = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        return cls(tuple(lengths), max(lengths), boundaries, **fields)


@dataclass(frozen=True)
class Paths(Spans):
    """All tokens of each packed row: what it attends to. `places` is where each is among the computed ones [T]."""

    places: Tensor = field(kw_only=True)


@dataclass(frozen=True)
class PackedRows(Spans):
    """The tokens that each packed row computes; rows without any are left out."""

    group: ProcessGroup | None = None  # its ranks each hold a slice of the tokens
    paths: Paths | None = None  # None: no row shares tokens with another

    def map(self, function: Callable[[Tensor], Tensor]) -> "PackedRows":
        """Apply a function to every tensor."""
        paths = self.paths
        if paths is not None:
            paths = replace(paths, boundaries=function(paths.boundaries), places=function(paths.places))
        return replace(self, boundaries=function(self.boundaries), paths=paths)


@dataclass(frozen=True)
class SequenceSlice:
    """This rank's slice of tokens that the ranks of a group share."""

    group: ProcessGroup
    at: Tensor  # [response tokens of the slice], their places among all
    predictors: Tensor  # [response tokens] those of the whole rows, in host memory


@dataclass(frozen=True)
class PictureInputs:
    """The distinct pictures of rows, one after another, and the feature that each placeholder of the rows reads."""

    pixels: Tensor  # [patches, values]
    grids: Tensor  # [pictures, 3] int64, in host memory: a tower reads it there
    taken: Tensor  # [placeholders] int64, in the order of the flattened input
    at: Tensor  # [placeholders] int64, their places in the flattened input; in host memory
    tower: Mapping[str, Any] = field(default_factory=dict)  # what the tower computes from grids, on its device

    def among(self, tokens: Tensor) -> "PictureInputs":
        """Return the inputs for these tokens of the flattened input, in ascending order, with all pictures."""
        at = torch.searchsorted(tokens, self.at)
        inside = tokens[at.clamp(max=len(tokens) - 1)] == self.at
        return replace(self, taken=self.taken[inside], at=at[inside])


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

    @property
    def computed(self) -> int:
        """Return how many tokens the model computes, with padding; those of all slices."""
        return self.input_ids.numel() if self.packed is None else sum(self.packed.lengths)

    def map(self, function: Callable[[Tensor], Tensor]) -> "ModelInputs":
        """Apply a function to every tensor."""
        packed, slice_ = self.packed and self.packed.map(function), self.slice
        if slice_ is not None:
            slice_ = replace(slice_, at=function(slice_.at))
        own: dict[str, Any] = {name: function(item) for name, item in vars(self).items() if isinstance(item, Tensor)}
        carried = {name: function(value) for name, value in self.carried.items()}
        pictures = self.pictures
        if pictures is not None:
            tower = {key: function(each) if isinstance(each, Tensor) else each for key, each in pictures.tower.items()}
            moved = {name: function(getattr(pictures, name)) for name in ("pixels", "taken")}
            pictures = replace(pictures, tower=tower, **moved)
        return replace(self, **own, packed=packed, carried=carried, pictures=pictures, slice=slice_)

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


# -- each token once ---------------------------------------------------------------------------------------------------


def each_token_once(inputs: ModelInputs, rows: Batch, ahead: int, shares: bool) -> ModelInputs:
    """Return packed inputs of these rows without the tokens whose hidden states nothing reads, and if the model shares,
    without those that a row has in common with the one before it. Padded inputs stay as they are."""
    lengths, shared = rows.lengths.numpy(), shared_beginnings(rows) if shares else np.zeros(len(rows), np.int64)
    if inputs.packed is None or not (ahead or shared.any()):
        return inputs
    starts, read = lengths.cumsum() - lengths, lengths - ahead  # the output of a last token would predict nothing
    own = read - shared
    computed = places(torch.from_numpy(starts + shared), torch.from_numpy(own))
    at = np.full(lengths.sum(), -1)  # where each token of the rows is among the computed ones
    at[computed.numpy()] = np.arange(len(computed))
    for row in shared.nonzero()[0].tolist():
        at[starts[row] :][: shared[row]] = at[starts[row - 1] :][: shared[row]]
    computes, paths = own > 0, None
    if shared.any():
        path = places(torch.from_numpy(starts[computes]), torch.from_numpy(read[computes]))
        paths = Paths.of(read[computes].tolist(), places=torch.from_numpy(at)[path])
    of_tokens = {name: value[computed] for name, value in inputs.carried.items() if declared(name).axis == "token"}
    return replace(
        inputs,
        input_ids=inputs.input_ids[:, computed],
        position_ids=inputs.position_ids[..., computed],
        predictors=torch.from_numpy(at)[inputs.predictors],
        packed=PackedRows.of(own[computes].tolist(), paths=paths),
        carried=inputs.carried | of_tokens,
        pictures=inputs.pictures and inputs.pictures.among(computed),
    )


def as_read(rows: Batch, reads: Sequence[str]) -> Batch:
    """Return the rows as a model reads them, with the carried fields that it reads."""
    rows = rows.in_context() if CONTEXT in reads else rows
    return replace(rows, carried={name: value for name, value in rows.carried.items() if name in reads})


def tree_order(batch: Batch) -> np.ndarray:
    """Return the rows of each group in the order of their tokens, groups in the order of their first rows [rows]."""
    rows, groups = token_bytes(batch), batch.group.tolist()
    number = {group: place for place, group in enumerate(dict.fromkeys(groups))}
    return np.array(sorted(range(len(rows)), key=lambda row: (number[groups[row]], rows[row])), dtype=np.int64)


def shared_beginnings(batch: Batch, order: Sequence[int] | np.ndarray | None = None) -> np.ndarray:
    """Return how many tokens each row has in common with the row before it in this order [rows]; at most one less than
    the shorter of the two has. All that enters a common token is equal: its id, and the batch's carried fields that
    enter a model. Rows of different groups share an eighth of the row or nothing: for the few tokens with which a chat
    template begins, keys and values of all rows would be copied in every layer."""
    rows, lengths, groups = token_bytes(batch), batch.lengths.tolist(), batch.group.tolist()
    shared = np.zeros(len(rows), np.int64)
    neighbours = [*pairwise(range(len(rows)) if order is None else [*map(int, order)])]
    for before, row in neighbours:
        most = min(lengths[before], lengths[row]) - 1
        shared[row] = common = _common(rows[before], rows[row], most)
        if 8 * common < lengths[row] and groups[before] != groups[row]:
            shared[row] = 0
    ends = batch.lengths.cumsum(0).tolist()
    for name in [name for name in batch.carried if declared(name).enters] if shared.any() else ():
        values = _per_token(batch, name)
        for before, row in [pair for pair in neighbours if shared[pair[1]]]:
            ours, theirs = (values[ends[each] - lengths[each] :][: shared[row]] for each in (row, before))
            if len(other := (ours != theirs).reshape(len(ours), -1).any(1).nonzero()[0]):
                shared[row] = other[0]
    return shared


def computed_tokens(rows: Batch, shares: bool) -> int:
    """Return how many tokens of these rows a model computes together, without padding."""
    return int(rows.lengths.sum()) - (int(shared_beginnings(rows).sum()) if shares else 0)


def token_bytes(batch: Batch) -> list[bytes]:
    """Return each row's token ids, prompt and response, as bytes that compare as the ids do. An index of all tokens
    would take five times as long."""
    parts = []
    for ids, lengths in ((batch.prompt_ids, batch.prompt_lengths), (batch.response_ids, batch.response_lengths)):
        content, ends = ids.numpy().astype(">i4").view(np.uint8).data, (4 * lengths.cumsum(0)).tolist()
        parts.append([content[start:end] for start, end in pairwise([0, *ends])])
    return [b"".join(pair) for pair in zip(*parts, strict=True)]


def _common(first: bytes, second: bytes, most: int) -> int:
    """Return with how many equal tokens, of four bytes each, two rows begin, but `most` at most."""
    equal = 0
    while equal < most:
        middle = (equal + most + 1) // 2
        if first[4 * equal : 4 * middle] == second[4 * equal : 4 * middle]:
            equal = middle
        else:
            most = middle - 1
    return equal


def _per_token(batch: Batch, name: str) -> np.ndarray:
    """Return a carried field with a value for every token of the rows; an item has its value at its first token."""
    field, values, lengths = declared(name), batch.carried[name], batch.lengths
    if field.axis == "token":
        return values.numpy()
    starts = lengths.cumsum(0) - lengths
    if field.axis == "items":
        others = (other for other in batch.carried if declared(other).lengths == field.lengths)
        first = next((batch.carried[other] for other in others if declared(other).join == "places"), None)
        if first is None:
            raise ValueError(f"carried field {name}: it enters the model, and no field has the places of its items")
        at = starts.repeat_interleave(batch.carried[field.lengths]) + first.long()
    elif field.axis == "row":
        return values.repeat_interleave(lengths, 0).numpy()
    elif field.axis == "prompt":
        at = places(starts, batch.prompt_lengths)
    else:
        at = places(starts + batch.prompt_lengths, batch.response_lengths)
    return values.new_full((int(lengths.sum()), *values.shape[1:]), field.absent).index_copy_(0, at, values).numpy()


def read_at(values: Tensor, at: Tensor, dim: int = 0) -> Tensor:
    """Return the values at these places of a dimension. Where several readers take one, the sum of their gradients is
    computed in float32: each addition in bfloat16 would round to 8 bits."""
    return _Read.apply(values, at, dim)


class _Read(Function):
    @staticmethod
    def forward(ctx, values: Tensor, at: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(at)
        ctx.shape, ctx.dim = values.shape, dim
        return values.index_select(dim, at)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (at,), gradient = ctx.saved_tensors, gradients[0]
        total = gradient.new_zeros(ctx.shape, dtype=torch.promote_types(gradient.dtype, torch.float32))
        return total.index_add_(ctx.dim, at, gradient.to(total.dtype)).to(gradient.dtype), None, None


# -- layers that mix neighbouring tokens -------------------------------------------------------------------------------


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
    whole, lengths = hidden_states, packed.lengths
    if packed.paths is not None:
        whole, lengths = read_at(hidden_states, packed.paths.places, 1), packed.paths.lengths
    outputs = (forward(row, *arguments, **options) for row in whole.split(lengths, dim=1))
    return torch.cat([output[:, -own:] for output, own in zip(outputs, packed.lengths, strict=True)], dim=1)

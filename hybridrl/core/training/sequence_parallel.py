"""DeepSpeed-Ulysses (Jacobs et al. 2023): neighbours share rows. Each computes a slice of the packed tokens, and
in attention all tokens for its share of the heads.

Every rank of a group ends with the outputs of all response tokens, so that a loss does not depend on sequence
parallelism. Its backward pass starts from the outputs of its own slice, so that the ranks' gradients add up.
"""

from dataclasses import replace
from datetime import timedelta
from functools import cache
from math import gcd

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from hybridrl.core import device as devices
from hybridrl.core.training.packing import ModelInputs, PackedRows, SequenceSlice


@cache
def sequence_group(size: int, timeout_seconds: float) -> ProcessGroup | None:
    """Return the group of `size` neighbouring ranks that share rows with this one, or None for size 1; collective."""
    if size == 1:
        return None
    return devices.own_group(dist.new_subgroups(size, timeout=timedelta(seconds=timeout_seconds))[0])


def slice_of(inputs: ModelInputs, group: ProcessGroup | None) -> ModelInputs:
    """Return this rank's slice of packed rows, with the lengths of all rows; unchanged without a group.

    Padding tokens, which no output reads, follow as a further row so that all slices have the same length."""
    if group is None:
        return inputs
    assert inputs.packed is not None, "padded rows cannot be sliced"
    tokens = inputs.input_ids.shape[1]
    padding = -tokens % group.size()
    width = (tokens + padding) // group.size()
    first = group.rank() * width
    start, end = torch.searchsorted(inputs.predictors, torch.tensor([first, first + width])).tolist()
    return replace(
        inputs,
        input_ids=F.pad(inputs.input_ids, (0, padding))[:, first : first + width],
        position_ids=F.pad(inputs.position_ids, (0, padding))[:, first : first + width],
        predictors=inputs.predictors[start:end] - first,
        targets=inputs.targets[start:end],
        packed=PackedRows.of([*inputs.packed.lengths, *[padding] * bool(padding)], group),
        slice=SequenceSlice(group, start, len(inputs.targets)),
    )


def gather_slices(own: Tensor, slice_: SequenceSlice | None) -> Tensor:
    """Return the outputs of all response tokens, given those of this rank's slice; collective, except backwards."""
    return own if slice_ is None else _GatherSlices.apply(own, slice_)


def to_heads(query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange [1, heads, T / ranks, width] of a slice for [1, heads / ranks, T, width]; collective both ways. Where
    there are fewer key and value heads than ranks, several ranks get the same head."""
    ranks, heads = group.size(), query.shape[1]
    if heads % ranks:
        raise ValueError(f"ulysses_sequence_parallel_size={ranks}: must divide the model's {heads} attention heads")
    copies = ranks // gcd(key.shape[1], ranks)
    if copies > 1:
        key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
    exchanged = (_Exchange.apply(tensor[0].unflatten(0, (ranks, -1)), group) for tensor in (query, key, value))
    query, key, value = (blocks.transpose(0, 1).flatten(1, 2)[None] for blocks in exchanged)
    return query, key, value


def to_tokens(output: Tensor, group: ProcessGroup) -> Tensor:
    """Undo `to_heads` for an attention output: [1, T, heads / ranks, width] -> [1, T / ranks, heads, width]."""
    return _Exchange.apply(output[0].unflatten(0, (group.size(), -1)), group).transpose(0, 1).flatten(1, 2)[None]


class _Exchange(Function):
    """All-to-all: block j of rank i becomes block i of rank j [ranks, ...]. It is its own inverse and transpose."""

    @staticmethod
    def forward(ctx, blocks: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(blocks, group)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradients[0], ctx.group), None


def _all_to_all(blocks: Tensor, group: ProcessGroup) -> Tensor:
    received = torch.empty_like(blocks, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, blocks.contiguous(), group=group)
    return received


class _GatherSlices(Function):
    @staticmethod
    def forward(ctx, own: Tensor, slice_: SequenceSlice) -> Tensor:
        ctx.span = slice(slice_.start, slice_.start + len(own))
        outputs = own.new_zeros(slice_.total)
        outputs[ctx.span] = own
        dist.all_reduce(outputs, group=slice_.group)  # exact: all other ranks add zeros
        return outputs

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][ctx.span], None

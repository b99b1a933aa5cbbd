"""Neighbouring ranks that share rows: each computes a slice of the line that they lie in, and in attention all tokens
of its share of the heads (DeepSpeed-Ulysses, Jacobs et al. 2023).

Every rank of a group ends with the outputs of all response tokens, so that a loss needs not know of it; in the backward
pass it goes on with those of its slice alone, so that the ranks' gradients add up to that of the rows.
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

from hybridrl.training.packing import Line, ModelInputs, SharedLine


@cache
def sequence_group(size: int, timeout_seconds: float) -> ProcessGroup | None:
    """The `size` neighbouring ranks that share rows with this one; collective. None: it has its rows for itself."""
    if size == 1:
        return None
    return dist.new_subgroups(size, timeout=timedelta(seconds=timeout_seconds))[0]


def slice_of(inputs: ModelInputs, group: ProcessGroup | None) -> ModelInputs:
    """This rank's slice of rows that lie in one line, with the lengths of all of them; as it is without a group.

    So that slices are equally long, tokens that nothing reads follow as a further row."""
    if group is None:
        return inputs
    assert inputs.line is not None, "rows laid out apart are in no line"
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
        line=Line.of([*inputs.line.lengths, *[padding] * bool(padding)], group),
        shared=SharedLine(group, start, len(inputs.targets)),
    )


def of_all_slices(own: Tensor | None, shared: SharedLine | None) -> Tensor | None:
    """Outputs of all response tokens from those of this rank's slice; collective, but not in the backward pass."""
    return own if own is None or shared is None else _OfAllSlices.apply(own, shared)


def to_heads(query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """[1, heads, T / ranks, width] of a slice -> [1, heads / ranks, T, width] of the line; collective both ways. Where
    keys and values have too few heads for the ranks, a head goes to several."""
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
    """The way back, of an attention's output: [1, T, heads / ranks, width] -> [1, T / ranks, heads, width]."""
    return _Exchange.apply(output[0].unflatten(0, (group.size(), -1)), group).transpose(0, 1).flatten(1, 2)[None]


class _Exchange(Function):
    """Rank i's block j becomes rank j's block i [ranks, ...], which is its own inverse and its own transpose."""

    @staticmethod
    def forward(ctx, blocks: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(blocks, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradient, ctx.group), None


def _exchanged(blocks: Tensor, group: ProcessGroup) -> Tensor:
    found = torch.empty_like(blocks, memory_format=torch.contiguous_format)
    dist.all_to_all_single(found, blocks.contiguous(), group=group)
    return found


class _OfAllSlices(Function):
    @staticmethod
    def forward(ctx, own: Tensor, shared: SharedLine) -> Tensor:
        ctx.place = slice(shared.start, shared.start + len(own))
        whole = own.new_zeros(shared.total)
        whole[ctx.place] = own
        dist.all_reduce(whole, group=shared.group)  # exact: all other ranks add zeros
        return whole

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[ctx.place], None

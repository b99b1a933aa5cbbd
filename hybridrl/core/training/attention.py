"""Causal attention for packed rows, registered with transformers under one name.

CUDA uses torch's variable-length kernel where it supports the type; everything else is computed row by row. Nothing is
padded, and the output of a row does not depend on the other rows.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import cache
from inspect import signature
from math import gcd
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedConfig

from hybridrl.core import device as devices
from hybridrl.core.carried import declared
from hybridrl.core.training.packing import ModelInputs, PackedRows, Paths, SequenceSlice, read_at
from hybridrl.required import required

WIDEST_HEAD = 256  # the limit of FlashAttention 2, on which torch's kernel is based
# A mask skips no block of scores, a causal kernel half of them: rows with this many queries, and less than as many keys
# before them, are computed by it, with queries before theirs that nothing reads.
WORTH_CAUSAL = 384
NAME = "hybridrl_packed"
TOWER = "hybridrl_flash_pictures"  # transformers gives the boundaries of pictures to a name with "flash" in it


class Options(NamedTuple):
    """Options that change attention scores and weights."""

    scaling: float | None
    dropout: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


def attend(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, width] packed, or [B, heads, T, width]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,  # tokens that each token attends to, itself included; None: all
    softcap: float | None = None,  # scores are bounded by softcap * tanh(score / softcap) (Gemma 2)
    s_aux: Tensor | None = None,  # [heads], attention sinks: one score per head without a value (GPT-OSS)
    packed: PackedRows | None = None,  # None: padded on the right; causal attention ignores the padding
    **_: object,
) -> tuple[Tensor, None]:
    """Return the attention output [B, T, heads, width], with the signature that transformers expects."""
    options = Options(scaling, dropout, sliding_window, softcap, s_aux)
    if packed is not None and packed.group is None and kernel_computes(query, value, options):
        return _by_kernel(query, key, value, packed, options), None
    return _uncompiled(query, key, value, packed, options), None


@torch.compiler.disable
def _uncompiled(query: Tensor, key: Tensor, value: Tensor, packed: PackedRows | None, options: Options) -> Tensor:
    """Compute what compiled layers leave out: numbers of rows and lengths would become constants in their graphs."""
    if packed is None:
        return _causal(query, key, value, options).transpose(1, 2)
    if packed.group is None:
        return _packed(query, key, value, packed, options)
    of_heads = to_heads(query, key, value, packed.group)
    if options.sinks is not None:
        options = options._replace(sinks=options.sinks.chunk(packed.group.size())[packed.group.rank()])
    return to_tokens(_packed(*of_heads, packed, options), packed.group)


def _packed(query: Tensor, key: Tensor, value: Tensor, packed: PackedRows, options: Options) -> Tensor:
    if kernel_computes(query, value, options):
        return _by_kernel(query, key, value, packed, options)
    spans = packed.paths or packed
    if packed.paths is not None:
        by_token = (read_at(tensor[0].transpose(0, 1), packed.paths.places) for tensor in (key, value))
        key, value = (tensor.transpose(0, 1)[None] for tensor in by_token)
    lengths = packed.lengths, spans.lengths, spans.lengths
    rows = zip(
        *(each.split(sizes, dim=2) for each, sizes in zip((query, key, value), lengths, strict=True)), strict=True
    )
    return torch.cat([_causal(q, k, v, options).transpose(1, 2) for q, k, v in rows], dim=1)


def _by_kernel(query: Tensor, key: Tensor, value: Tensor, packed: PackedRows, options: Options) -> Tensor:
    grouped: dict[str, Any] = GROUPED if query.shape[1] != key.shape[1] else {}
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))  # [T, heads, width]
    if packed.paths is not None:
        heads = k.shape[1]
        k, v = read_at(torch.cat([k, v], 1), packed.paths.places).tensor_split([heads], 1)
    # With fewer queries than keys the last query is at the last key: FlashAttention aligns the mask there.
    spans = packed.paths or packed
    window = (-1 if options.window is None else options.window - 1, 0)
    limits = (packed.boundaries, spans.boundaries, packed.longest, spans.longest)
    attended: Any = varlen_attn(q, k, v, *limits, scale=options.scaling, window_size=window, **grouped)
    return attended[None]


def kernel_computes(query: Tensor, value: Tensor, options: Options) -> bool:
    """Return whether torch's variable-length kernel computes this attention; otherwise rows go one by one."""
    plain = options.softcap is None and options.sinks is None and not options.dropout
    return plain and devices.has_varlen_attention(query.device) and kernel_supports(query, value)


def kernel_supports(query: Tensor, value: Tensor) -> bool:
    """Return whether torch's variable-length kernel supports these types and widths."""
    width = query.shape[-1]
    half = query.dtype in (torch.bfloat16, torch.float16)
    return half and width == value.shape[-1] and width % 8 == 0 and width <= WIDEST_HEAD


def _causal(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
    """Return the attention output of rows whose last queries are at the last keys [B, heads, queries, width]."""
    scaling, dropout, window, softcap, sinks = options
    queries, keys, mask = query.shape[2], key.shape[2], None
    before = keys - queries
    eager = softcap is not None or sinks is not None
    if eager or (window is not None and keys > window) or before:
        if not eager and window is None and queries >= max(WORTH_CAUSAL, before):
            whole = F.pad(query, (0, 0, before, 0))
            return _causal(whole, key, value, options)[:, :, before:]
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(before)
    if mask is not None and window is not None:
        mask = mask.triu(before + 1 - window)
    if eager:
        return _eager(query, key, value, required(mask), options)
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )


def _eager(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: Options) -> Tensor:
    """Materialise the scores [rows, heads, longest, longest]: no torch kernel has soft caps or sinks."""
    scaling, dropout, _, softcap, sinks = options
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.float().masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    shares = scores.softmax(-1)[..., : value.shape[2]].to(value.dtype)
    return F.dropout(shares, dropout) @ value


def grouped_option(kernel: Callable[..., Any]) -> dict[str, bool]:
    """Return the option for grouped-query attention; torch 2.11 has none, and accepts fewer key heads without it."""
    return {"enable_gqa": True} if "enable_gqa" in signature(kernel).parameters else {}


GROUPED = grouped_option(varlen_attn)


def attend_in_pictures(
    module: nn.Module,
    query: Tensor,  # [1, heads, patches, width], as keys and values
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float | None = None,
    *,
    cu_seq_lens_q: Tensor,  # [pictures or windows + 1] int32, their boundaries
    max_length_q: int,  # patches of the longest
    **_: object,
) -> tuple[Tensor, None]:
    """Return the attention output [1, patches, heads, width] of a tower: the patches of a picture, or of a window of
    it, attend to each other both ways."""
    options = Options(scaling, 0.0, None, None, None)
    if kernel_computes(query, value, options):
        q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
        limits = cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q
        attended: Any = varlen_attn(q, k, v, *limits, scale=scaling, window_size=(-1, -1))
        return attended[None], None
    lengths = cu_seq_lens_q.diff().tolist()
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*part, scale=scaling) for part in parts], 2).transpose(1, 2), None


def implementation(settings: PreTrainedConfig) -> str | dict[str, str]:
    """Return the name of this attention for transformers; in a tower pictures attend both ways."""
    return {"": NAME, "text_config": NAME, "vision_config": "sdpa"} if "vision_config" in settings.sub_configs else NAME


AttentionInterface.register(NAME, attend)
AttentionInterface.register(TOWER, attend_in_pictures)


# -- Ulysses -----------------------------------------------------------------------------------------------------------
#
# DeepSpeed-Ulysses (Jacobs et al. 2023): neighbouring ranks share rows. Each computes a slice of the packed
# tokens, and in attention all tokens for its share of the heads.
#
# Every rank of a group ends with the outputs of all response tokens, so that a loss does not depend on sequence
# parallelism. Its backward pass starts from the outputs of its own slice, so that the ranks' gradients add up.


@cache
def sequence_group(size: int, timeout_seconds: float, tensor_ranks: int = 1) -> ProcessGroup | None:
    """Return this rank's group of `size` ranks that share rows, or None for size 1; collective. They are neighbours,
    or with tensor parallelism the ranks with the same part of the layers in neighbouring tensor groups."""
    if size == 1:
        return None
    ranks = torch.arange(dist.get_world_size()).view(-1, size, tensor_ranks).mT.reshape(-1, size)
    subgroups = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timedelta(seconds=timeout_seconds))
    return devices.own_group(subgroups[0])


def slice_of(inputs: ModelInputs, group: ProcessGroup | None) -> ModelInputs:
    """Return this rank's slice of packed rows, with the lengths of all rows; unchanged without a group.

    A last row of padding tokens makes all slices equally long; no output reads it."""
    if group is None:
        return inputs
    assert inputs.packed is not None, "padded rows cannot be sliced"
    tokens, packed = inputs.input_ids.shape[1], inputs.packed
    padding = -tokens % group.size()
    width = (tokens + padding) // group.size()
    first = group.rank() * width
    at = ((inputs.predictors >= first) & (inputs.predictors < first + width)).nonzero().flatten()
    last_row, paths, carried = [padding] * bool(padding), packed.paths, dict(inputs.carried)
    if paths is not None:
        own = torch.arange(tokens, tokens + padding)
        paths = Paths.of([*paths.lengths, *last_row], places=torch.cat([paths.places, own]))
    for name, value in carried.items():
        if declared(name).axis == "token":
            value = F.pad(value, (*(0, 0) * (value.dim() - 1), 0, padding), value=declared(name).absent)
            carried[name] = value[first : first + width]
    return replace(
        inputs,
        input_ids=F.pad(inputs.input_ids, (0, padding))[:, first : first + width],
        position_ids=F.pad(inputs.position_ids, (0, padding))[..., first : first + width],
        predictors=inputs.predictors[at] - first,
        targets=inputs.targets[at],
        packed=PackedRows.of([*packed.lengths, *last_row], group=group, paths=paths),
        carried=carried,
        pictures=inputs.pictures and inputs.pictures.among(torch.arange(first, first + width)),
        slice=SequenceSlice(group, at, inputs.predictors),
    )


def gather_slices(own: Tensor, slice_: SequenceSlice | None) -> Tensor:
    """Return the outputs of all response tokens, given those of this rank's slice; collective, but not backwards."""
    return own if slice_ is None else _GatherSlices.apply(own, slice_)


def to_heads(query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange [1, heads, T / ranks, width] of a slice for [1, heads / ranks, T, width]; collective, also in the
    backward pass. If there are fewer key and value heads than ranks, several ranks get the same head."""
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
        ctx.save_for_backward(slice_.at)
        outputs = own.new_zeros(len(slice_.predictors), *own.shape[1:]).index_copy_(0, slice_.at, own)
        dist.all_reduce(outputs, group=slice_.group)  # exact: all other ranks add zeros
        return outputs

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][ctx.saved_tensors[0]], None

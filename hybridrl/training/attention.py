"""Causal attention for rows that lie end to end in one line, registered with transformers under one name.

CUDA uses torch's variable-length kernel where the type allows; everything else goes row by row. Nothing is padded, and
what comes of a row does not depend on those beside it.
"""

from collections.abc import Callable
from dataclasses import replace
from inspect import signature

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from hybridrl import device as devices
from hybridrl.training.packing import Line
from hybridrl.training.sequence_parallel import to_heads, to_tokens

WIDEST_HEAD = 256  # that FlashAttention 2, which torch's kernel is made of, computes with
NAME = "hybridrl_packed"


def attend(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, width] in one line, or [B, heads, T, width]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,  # how many tokens, its own included, a token sees; None: all before it
    softcap: float | None = None,  # bends scores so that none exceeds it (Gemma 2)
    s_aux: Tensor | None = None,  # [heads], a score a head that takes its share and brings nothing (GPT-OSS's sinks)
    line: Line | None = None,  # None: a right-padded rectangle: causality hides the padding
    **_: object,
) -> tuple[Tensor, None]:
    """Attention output [B, T, heads, width], as transformers expects it of an attention function."""
    if line is None:
        return _causal(query, key, value, scaling, dropout, sliding_window, softcap, s_aux).transpose(1, 2), None
    if line.group is not None:
        of_all, options = to_heads(query, key, value, line.group), (scaling, dropout, sliding_window, softcap)
        if s_aux is not None:
            s_aux = s_aux.chunk(line.group.size())[line.group.rank()]
        output, _ = attend(module, *of_all, attention_mask, *options, s_aux, replace(line, group=None))
        return to_tokens(output, line.group), None
    plain = softcap is None and s_aux is None and not dropout
    if plain and devices.has_varlen_attention(query.device) and kernel_takes(query, value):
        tokens = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, heads, width]
        return _varlen_kernel(*tokens, line, scaling, sliding_window)[None], None
    rows = zip(*(tensor.split(line.lengths, dim=2) for tensor in (query, key, value)), strict=True)
    outputs = [_causal(*row, scaling, dropout, sliding_window, softcap, s_aux).transpose(1, 2) for row in rows]
    return torch.cat(outputs, dim=1), None


def kernel_takes(query: Tensor, value: Tensor) -> bool:
    """Whether torch's variable-length kernel computes these types and widths; others go row by row."""
    width = query.shape[-1]
    half = query.dtype in (torch.bfloat16, torch.float16)
    return half and width == value.shape[-1] and width % 8 == 0 and width <= WIDEST_HEAD


def _causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    dropout: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    length, seen = query.shape[2], None
    written_out = softcap is not None or sinks is not None
    if written_out or (window is not None and length > window):
        seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    if seen is not None and window is not None:
        seen = seen.triu(1 - window)
    if written_out:
        return _written_out(query, key, value, scaling, dropout, seen, softcap, sinks)
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, dropout_p=dropout, is_causal=seen is None, scale=scaling, enable_gqa=grouped
    )


def _written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    dropout: float,
    seen: Tensor,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """No kernel of torch bends scores or has sinks: this holds scores [rows, heads, longest, longest]."""
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.float().masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    shares = scores.softmax(-1)[..., : value.shape[2]].to(value.dtype)
    return F.dropout(shares, dropout) @ value


def _varlen_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    line: Line,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    longest = max(line.lengths)
    grouped = grouped_option(varlen_attn) if query.shape[1] != key.shape[1] else {}
    return varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        line.boundaries,
        line.boundaries,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )


def grouped_option(kernel: Callable[..., Tensor]) -> dict[str, bool]:
    """What lets several query heads share a key: torch 2.11 has no such argument, and takes fewer keys as they are."""
    return {"enable_gqa": True} if "enable_gqa" in signature(kernel).parameters else {}


# Not compiled with the layers around it: rows' lengths, which change with every pass, would be part of the program.
AttentionInterface.register(NAME, torch.compiler.disable(attend))

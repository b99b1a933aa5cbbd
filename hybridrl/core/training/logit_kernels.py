"""Token outputs and their gradient with respect to the logits, for CUDA: Triton kernels that read each logit once.

The first reads a token's logits in blocks and keeps running sums relative to the largest so far (Milakov and
Gimelshein 2018); log-probs, entropies and squares follow from these sums. The second reads the logits of the policy and
of another model, and computes the divergence. The third reads all of them again and overwrites the policy's with the
gradient. Logits stay in the head's type, as the matrix product writes them; sums are float32. The formulas are in
`token_outputs` and `heads`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrl.config.catalog import Divergence
from hybridrl.core.training.heads import UNREACHED, Head, ReferenceOutputs
from hybridrl.core.training.token_outputs import LogitTables, OutputSpec, TokenOutputs

BLOCK, WARPS = 4096, 8  # logits per block of a program, and its warps
LEAST = tl.constexpr(-1e30)  # below every logit, but finite: LEAST - LEAST is 0
KINDS = {"reverse_kl": 0, "forward_kl": 1, "jsd": 2}
_DIVERGENCES = ("reference_kl", "teacher_divergence")
ABSENT = (None,) * 10  # the arguments of `_slope` for a model that is not there


class ComparedLogits:
    """One other model in a chunk: its logits, in its head's type, and numbers of tokens that the gradient needs."""

    def __init__(self, head: Head, divergence: Divergence, rows: int, tokens: int) -> None:
        self.head, self.divergence = head.first(rows), divergence
        self.table = head.weight.new_empty(tokens, len(self.head.weight))
        self.logits = self.normalisers = self.shares = self.levels = self.table

    def arguments(self, by: Tensor) -> tuple[Any, ...]:
        """Return the arguments of `_slope`, with the gradient with respect to the divergence [tokens]."""
        kind, beta, _ = self.divergence
        numbers = self.normalisers, self.shares, self.levels
        return self.logits, *_numbers(self.head), *numbers, by.contiguous(), beta, KINDS[kind]


class LogitKernels(LogitTables):
    """`LogitTables` computed by kernels, in the head's type; the gradient overwrites the logits."""

    def __init__(self, head: Head, spec: OutputSpec, tokens: int) -> None:
        self.head, self.spec, rows = head, spec, len(head.weight)
        self.table = head.weight.new_empty(tokens, rows)
        self.others = [
            ComparedLogits(other.head, kind, rows, tokens)
            for other, kind in spec.compared
            if isinstance(other, ReferenceOutputs)
        ]

    def fill(self, hidden: Tensor, targets: Tensor, others: Sequence[Tensor], *, keep: bool) -> TokenOutputs:
        self.targets, self.logits = targets, self.head.linear(hidden, self.table[: len(targets)])
        outputs, self.normalisers = self._read(self.logits, self.head, self.spec.outputs[:3])
        names = (name for name, there in zip(_DIVERGENCES, self.spec.outputs[3:5], strict=True) if there)
        for name, other, of_other in zip(names, self.others, others, strict=True):
            other.logits = other.head.linear(of_other, other.table[: len(targets)])
            _, other.normalisers = self._read(other.logits, other.head, (True, False, False))
            divergences, unreached = self._compare(other)
            outputs = outputs._replace(**{name: divergences, "unreached": unreached})
        self.outputs = outputs if self.spec.teacher else outputs._replace(unreached=None)
        return self.outputs

    def _read(self, logits: Tensor, head: Head, requested: tuple[bool, ...]) -> tuple[TokenOutputs, Tensor]:
        """Return the outputs of these logits, and each token's logsumexp."""
        columns = iter(torch.empty(sum(requested) + 1, len(logits), dtype=torch.float32, device=logits.device))
        normalisers, outputs = (
            next(columns),
            TokenOutputs(next(columns), *(next(columns) if want else None for want in requested[1:])),
        )
        _outputs[(len(logits),)](
            logits, self.targets, *_numbers(head), normalisers, *outputs[:3],
            float(self.spec.temperature), BLOCK, num_warps=WARPS,
        )  # fmt: skip
        return outputs, normalisers

    def _compare(self, other: ComparedLogits) -> tuple[Tensor, Tensor]:
        """Return the divergence from another model, and its mass that the policy does not reach, both [tokens]."""
        columns = torch.empty(4, len(self.logits), dtype=torch.float32, device=self.logits.device)
        other.shares, other.levels, divergences, unreached = columns
        kind, beta, _ = other.divergence
        _divergence[(len(self.logits),)](
            self.logits, *_numbers(self.head), self.normalisers, other.logits, *_numbers(other.head),
            other.normalisers, *columns, beta, KINDS[kind], float(self.spec.temperature), UNREACHED,
            BLOCK, num_warps=WARPS,
        )  # fmt: skip
        return divergences, unreached

    def gradient(self, by: TokenOutputs) -> Tensor:
        """Return the gradient with respect to the logits, which it overwrites."""
        tokens, vocabulary = self.logits.shape
        gradients = (value for value in by[3:5] if value is not None)
        first, second, *_ = [*map(ComparedLogits.arguments, self.others, gradients), ABSENT, ABSENT]
        by_entropies = by.entropies.contiguous() if by.entropies is not None else None
        _gradient[(tokens, triton.cdiv(vocabulary, BLOCK))](
            self.logits, self.targets, *_numbers(self.head), self.normalisers, self.outputs.entropies,
            by.log_probs.contiguous(), by_entropies, *first, *second,
            float(self.spec.temperature), BLOCK, num_warps=WARPS,
        )  # fmt: skip
        return self.logits


def _numbers(head: Head) -> tuple[float | None, ...]:
    """Return the vocabulary size of a head, and the scale and cap of its logits."""
    return len(head.weight), *(number and float(number) for number in head.rule)


# The address of an output that is not requested is None. Each such combination is compiled separately.
@triton.jit
def _capped(logits, scale, cap):
    """Apply `LogitRule`. The tanh(x) of the cap is computed as 2 sigmoid(2x) - 1."""
    logits = logits.to(tl.float32) * scale
    if cap is not None:
        logits = cap * (2 * tl.sigmoid(2 * logits / cap) - 1)
    return logits


@triton.jit
def _log_probs(logits_at, row, columns, here, vocabulary, scale, cap, normalisers_at, temperature):
    """Compute the log-probs of a token at the columns that are `here`."""
    logits = tl.load(logits_at + row.to(tl.int64) * vocabulary + columns, here, 0.0)
    return _capped(logits, scale, cap) / temperature - tl.load(normalisers_at + row)


@triton.jit
def _log_sum(x, y):
    """Compute log(exp x + exp y)."""
    largest = tl.maximum(x, y)
    return largest + tl.log(1 + tl.exp(tl.minimum(x, y) - largest))


@triton.jit
def _outputs(
    logits_at, targets_at, vocabulary, scale, cap, normalisers_at, log_probs_at, entropies_at, squares_at,
    temperature, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one token per program."""
    row = tl.program_id(0)
    start, target = row.to(tl.int64) * vocabulary, tl.load(targets_at + row)
    own = _capped(tl.load(logits_at + start + target, target < vocabulary, 0.0), scale, cap) / temperature
    largest, total, weighted, squares = LEAST, 0.0, 0.0, 0.0
    for first in range(0, vocabulary, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        here, at = columns < vocabulary, start + columns
        x = _capped(tl.load(logits_at + at, here, 0.0), scale, cap) / temperature
        before = largest
        largest = tl.maximum(before, tl.max(tl.where(here, x, LEAST)))
        shrink = tl.exp(before - largest)  # sums relative to the largest so far become relative to the new one
        below = tl.where(here, x - largest, 0.0)
        e = tl.where(here, tl.exp(below), 0.0)
        if entropies_at is not None:
            weighted = shrink * (weighted + (before - largest) * total) + tl.sum(tl.where(e == 0, 0.0, e * below))
        if squares_at is not None:
            squares = shrink * shrink * squares + tl.sum(e * e)
        total = shrink * total + tl.sum(e)
    log_total = tl.log(total)
    tl.store(normalisers_at + row, largest + log_total)
    tl.store(log_probs_at + row, own - largest - log_total)
    if entropies_at is not None:
        tl.store(entropies_at + row, log_total - weighted / total)
    if squares_at is not None:
        tl.store(squares_at + row, squares / (total * total))


@triton.jit
def _divergence(
    logits_at, vocabulary, scale, cap, normalisers_at, others_at, common, others_scale, others_cap,
    others_normalisers_at, shares_at, levels_at, values_at, unreached_at, beta, KIND: tl.constexpr, temperature, reach,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one token per program. The other model's logits are those of the first `common` tokens."""
    row = tl.program_id(0)
    log_share = 0.0  # log of the policy's probability of these tokens
    if common < vocabulary:
        share = 0.0
        for first in range(0, common, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            here = columns < common
            log_p = _log_probs(logits_at, row, columns, here, vocabulary, scale, cap, normalisers_at, temperature)
            share += tl.sum(tl.where(here, tl.exp(log_p), 0.0))
        log_share = tl.log(share)
    of_p, of_q, unreached = 0.0, 0.0, 0.0
    for first in range(0, common, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        here = columns < common
        log_p = _log_probs(logits_at, row, columns, here, vocabulary, scale, cap, normalisers_at, temperature)
        log_p -= log_share
        log_q = _log_probs(
            others_at, row, columns, here, common, others_scale, others_cap, others_normalisers_at, temperature
        )
        p, q = tl.where(here, tl.exp(log_p), 0.0), tl.where(here, tl.exp(log_q), 0.0)
        gap = log_p - log_q
        if KIND == 0:
            of_p += tl.sum(tl.where(p == 0, 0.0, p * gap))
        elif KIND == 1:
            of_q -= tl.sum(tl.where(q == 0, 0.0, q * gap))
        else:  # the mixture relative to p, and to q
            of_p -= tl.sum(tl.where(p == 0, 0.0, p * _log_sum(tl.log(beta) - gap, tl.log(1 - beta))))
            of_q -= tl.sum(tl.where(q == 0, 0.0, q * _log_sum(tl.log(1 - beta) + gap, tl.log(beta))))
        unreached += tl.sum(tl.where(p < reach, q, 0.0))
    tl.store(shares_at + row, log_share)
    tl.store(levels_at + row, of_p)
    if KIND == 2:
        tl.store(values_at + row, beta * of_q + (1 - beta) * of_p)
    else:
        tl.store(values_at + row, of_p + of_q)
    tl.store(unreached_at + row, unreached)


@triton.jit
def _slope(
    log_p, row, columns, others_at, common, scale, cap, normalisers_at, shares_at, levels_at, by_at, beta, KIND,
    temperature,
):  # fmt: skip
    """Compute the gradient of a divergence with respect to these logits of the policy, before its cap."""
    here = columns < common
    log_p -= tl.load(shares_at + row)
    log_q = _log_probs(others_at, row, columns, here, common, scale, cap, normalisers_at, temperature)
    p, gap = tl.exp(log_p), log_p - log_q
    if KIND == 0:
        slope = tl.where(p == 0, 0.0, p * (gap - tl.load(levels_at + row)))
    elif KIND == 1:
        slope = p - tl.exp(log_q)
    else:
        from_mixture = -_log_sum(tl.log(beta) - gap, tl.log(1 - beta))
        slope = tl.where(p == 0, 0.0, (1 - beta) * p * (from_mixture - tl.load(levels_at + row)))
    return tl.where(here, tl.load(by_at + row) * slope, 0.0)


@triton.jit
def _gradient(
    logits_at, targets_at, vocabulary, scale, cap, normalisers_at, entropies_at, by_log_probs_at, by_entropies_at,
    first_at, first_rows, first_scale, first_cap, first_normalisers_at, first_shares_at, first_levels_at, by_first_at,
    first_beta, FIRST_KIND: tl.constexpr,
    second_at, second_rows, second_scale, second_cap, second_normalisers_at, second_shares_at, second_levels_at,
    by_second_at, second_beta, SECOND_KIND: tl.constexpr,
    temperature, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one block of a token's logits per program, with up to two other models."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here, at = columns < vocabulary, row.to(tl.int64) * vocabulary + columns
    capped = _capped(tl.load(logits_at + at, here, 0.0), scale, cap)
    log_p = capped / temperature - tl.load(normalisers_at + row)
    by_own = tl.load(by_log_probs_at + row)
    factor = -by_own
    if by_entropies_at is not None:
        factor -= tl.load(by_entropies_at + row) * (log_p + tl.load(entropies_at + row))
    p = tl.exp(log_p)
    gradient = tl.where(p == 0, 0.0, p * factor) + tl.where(columns == tl.load(targets_at + row), by_own, 0.0)
    if by_first_at is not None:
        gradient += _slope(
            log_p, row, columns, first_at, first_rows, first_scale, first_cap, first_normalisers_at, first_shares_at,
            first_levels_at, by_first_at, first_beta, FIRST_KIND, temperature,
        )  # fmt: skip
    if by_second_at is not None:
        gradient += _slope(
            log_p, row, columns, second_at, second_rows, second_scale, second_cap, second_normalisers_at,
            second_shares_at, second_levels_at, by_second_at, second_beta, SECOND_KIND, temperature,
        )  # fmt: skip
    if cap is not None:
        gradient *= 1 - (capped / cap) * (capped / cap)
    tl.store(logits_at + at, (gradient * scale / temperature).to(logits_at.dtype.element_ty), here)

"""Token outputs and their gradient with respect to the logits, for CUDA: two Triton kernels that read each logit once.

The first reads a token's logits in blocks and keeps running sums relative to the largest so far (Milakov and
Gimelshein 2018); every output follows from these sums. The second reads the logits again and overwrites them with the
gradient. Logits stay in the head's type, as the matrix product writes them; sums are float32. The formulas are in
`token_outputs`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrl.core.training.heads import Head
from hybridrl.core.training.token_outputs import LogitTables, OutputSpec, TokenOutputs
from hybridrl.required import required

BLOCK, WARPS = 4096, 8  # logits per block of a program, and its warps
LEAST = tl.constexpr(-1e30)  # below every logit, but finite: LEAST - LEAST is 0


class LogitKernels(LogitTables):
    """`LogitTables` computed by kernels, in the head's type; the gradient overwrites the logits."""

    def __init__(self, head: Head, spec: OutputSpec, tokens: int) -> None:
        self.head, self.spec = head, spec
        self.other = None if spec.against is None else spec.against.head.first(len(head.weight))
        heads = [head] if self.other is None else [head, self.other]
        self.tables = [head.weight.new_empty(tokens, len(each.weight)) for each in heads]
        self.others: Tensor | None = None
        self.others_normalisers: Tensor | None = None

    def fill(self, hidden: Tensor, targets: Tensor, others: Sequence[Tensor], *, keep: bool) -> TokenOutputs:
        head, other, self.targets = self.head, self.other, targets
        if other is not None:
            self.others = logits = other.linear(others[0], self.tables[1][: len(targets)])
            _, self.others_normalisers, _ = self._read(logits, other, (True,))
        self.logits = head.linear(hidden, self.tables[0][: len(targets)])
        self.outputs, self.normalisers, self.common_normalisers = self._read(self.logits, head, self.spec.outputs)
        return self.outputs

    def _read(self, logits: Tensor, head: Head, requested: tuple[bool, ...]) -> tuple[TokenOutputs, Tensor, Tensor]:
        """Return the outputs of these logits, and two logsumexps per token: over the vocabulary, and with a KL over the
        entries that both heads have."""
        columns = iter(torch.empty(sum(requested) + 2, len(logits), dtype=torch.float32, device=logits.device))
        outputs = TokenOutputs(next(columns), *(next(columns) if want else None for want in requested[1:4]))
        normalisers, common = columns
        _outputs[(len(logits),)](
            logits, self.targets, *self._numbers(head), self.others, self.others_normalisers,
            normalisers, common, *outputs[:4], BLOCK, num_warps=WARPS,
        )  # fmt: skip
        return outputs, normalisers, common

    def gradient(self, by: TokenOutputs) -> Tensor:
        pairs = zip(by, self.spec.differentiable, strict=True)
        by_log_probs, by_entropies, _, by_kl, _ = (
            required(value).contiguous() if learns else None for value, learns in pairs
        )
        tokens, vocabulary = self.logits.shape
        _gradient[(tokens, triton.cdiv(vocabulary, BLOCK))](
            self.logits, self.targets, *self._numbers(self.head), self.others, self.others_normalisers,
            self.normalisers, self.common_normalisers, self.outputs.entropies, self.outputs.reference_kl,
            by_log_probs, by_entropies, by_kl, BLOCK, num_warps=WARPS,
        )  # fmt: skip
        return self.logits

    def _numbers(self, head: Head) -> tuple[float | None, ...]:
        """Return the vocabulary sizes of head and reference, the temperature, and the scale and cap of each one's
        logits."""
        other = self.other or head
        numbers = (number and float(number) for rule in (head.rule, other.rule) for number in rule)
        return len(head.weight), len(other.weight), float(self.spec.temperature), *numbers


# The address of an output that is not requested is None. Each such combination is compiled separately.
@triton.jit
def _capped(logits, scale, cap):
    """Apply `LogitRule`. The tanh(x) of the cap is computed as 2 sigmoid(2x) - 1."""
    logits = logits.to(tl.float32) * scale
    if cap is not None:
        logits = cap * (2 * tl.sigmoid(2 * logits / cap) - 1)
    return logits


@triton.jit
def _outputs(
    logits_at, targets_at, vocabulary, common, temperature, scale, cap, others_scale, others_cap, others_at,
    others_normalisers_at, normalisers_at, common_normalisers_at, log_probs_at, entropies_at, squares_at, kl_at,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one token per program. The reference's logits cover the first `common` entries of the vocabulary."""
    row = tl.program_id(0)
    start, target = row.to(tl.int64) * vocabulary, tl.load(targets_at + row)
    own = _capped(tl.load(logits_at + start + target, target < vocabulary, 0.0), scale, cap) / temperature
    largest, total, weighted, squares, gap, shared = LEAST, 0.0, 0.0, 0.0, 0.0, 0.0
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
        if kl_at is not None:
            both, others = columns < common, others_at + row.to(tl.int64) * common + columns
            q = _capped(tl.load(others, both, 0.0), others_scale, others_cap) / temperature
            e_both = tl.where(both, e, 0.0)
            gap = shrink * gap + tl.sum(tl.where(e_both == 0, 0.0, e_both * (x - q)))
            shared = shrink * shared + tl.sum(e_both)
        total = shrink * total + tl.sum(e)
    log_total = tl.log(total)
    tl.store(normalisers_at + row, largest + log_total)
    tl.store(log_probs_at + row, own - largest - log_total)
    if entropies_at is not None:
        tl.store(entropies_at + row, log_total - weighted / total)
    if squares_at is not None:
        tl.store(squares_at + row, squares / (total * total))
    if kl_at is not None:
        log_shared = tl.log(shared)
        tl.store(common_normalisers_at + row, largest + log_shared)
        tl.store(kl_at + row, gap / shared - (largest + log_shared - tl.load(others_normalisers_at + row)))


@triton.jit
def _gradient(
    logits_at, targets_at, vocabulary, common, temperature, scale, cap, others_scale, others_cap, others_at,
    others_normalisers_at, normalisers_at, common_normalisers_at, entropies_at, kl_at, by_log_probs_at,
    by_entropies_at, by_kl_at, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one block of a token's logits per program."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here, at = columns < vocabulary, row.to(tl.int64) * vocabulary + columns
    capped = _capped(tl.load(logits_at + at, here, 0.0), scale, cap)
    log_p = capped / temperature - tl.load(normalisers_at + row)
    by_own = tl.load(by_log_probs_at + row)
    factor = -by_own
    if by_entropies_at is not None:
        factor -= tl.load(by_entropies_at + row) * (log_p + tl.load(entropies_at + row))
    if by_kl_at is not None:
        both, others = columns < common, others_at + row.to(tl.int64) * common + columns
        q = _capped(tl.load(others, both, 0.0), others_scale, others_cap) / temperature
        log_q = q - tl.load(others_normalisers_at + row)
        # minus the log of the policy's probability of all common entries; 0 if the heads have equally many rows
        renormalisation = tl.load(normalisers_at + row) - tl.load(common_normalisers_at + row)
        by_gap = tl.load(by_kl_at + row) * (log_p + renormalisation - log_q - tl.load(kl_at + row))
        factor += tl.where(both, tl.exp(renormalisation) * by_gap, 0.0)
    p = tl.exp(log_p)
    own = tl.where(columns == tl.load(targets_at + row), by_own, 0.0)
    gradient = tl.where(p == 0, 0.0, p * factor) + own
    if cap is not None:
        gradient *= 1 - (capped / cap) * (capped / cap)
    tl.store(logits_at + at, (gradient * scale / temperature).to(logits_at.dtype.element_ty), here)

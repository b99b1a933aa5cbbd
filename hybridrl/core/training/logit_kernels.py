"""Token outputs and their gradient with respect to the logits, for CUDA: two Triton kernels that read each logit once.

The first reads a token's logits in blocks and keeps running sums relative to the largest so far (Milakov and
Gimelshein 2018), from which every output follows. The second reads them again and overwrites them with the gradient.
Logits stay in the head's type, in which the matrix product writes them; sums are float32. `token_outputs` has the
formulas.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrl.core.required import required
from hybridrl.core.training.token_outputs import Head, LogitTables, OutputSpec, TokenOutputs

BLOCK, WARPS = 4096, 8  # logits that a program reads at once, and its warps
LEAST = tl.constexpr(-1e30)  # below every logit, but finite: LEAST - LEAST is 0


class LogitKernels(LogitTables):
    """The tables with kernels, in the head's type; the gradient overwrites the logits."""

    def __init__(self, head: Head, spec: OutputSpec, tokens: int) -> None:
        self.head, self.spec = head, spec
        self.tables = list(head.weight.new_empty((1 + (spec.against is not None), tokens, len(head.weight))))
        self.others: Tensor | None = None
        self.others_normalisers: Tensor | None = None

    def fill(self, hidden: Tensor, targets: Tensor, against: Tensor | None, *, keep: bool) -> TokenOutputs:
        head, spec, self.targets = self.head, self.spec, targets
        if against is not None:
            other = required(spec.against).head
            self.others = others = other.linear(against, self.tables[1][: len(targets)])
            _, self.others_normalisers = self._read(others, other, (True, False, False, False))
        self.logits = head.linear(hidden, self.tables[0][: len(targets)])
        self.outputs, self.normalisers = self._read(self.logits, head, spec.outputs)
        return self.outputs

    def _read(self, logits: Tensor, head: Head, wanted: tuple[bool, ...]) -> tuple[TokenOutputs, Tensor]:
        """Return the outputs of these logits, and the logarithm of each token's sum of exponentials."""
        columns = iter(torch.empty(sum(wanted) + 1, len(logits), dtype=torch.float32, device=logits.device))
        outputs = TokenOutputs._make(next(columns) if want else None for want in wanted)
        normalisers = next(columns)
        _outputs[(len(logits),)](
            logits, self.targets, *self._numbers(head), self.others, self.others_normalisers,
            normalisers, *outputs, BLOCK, num_warps=WARPS,
        )  # fmt: skip
        return outputs, normalisers

    def gradient(self, by: TokenOutputs) -> Tensor:
        pairs = zip(by, self.spec.differentiable, strict=True)
        by_log_probs, by_entropies, _, by_kl = (
            required(value).contiguous() if learns else None for value, learns in pairs
        )
        tokens, vocabulary = self.logits.shape
        _gradient[(tokens, triton.cdiv(vocabulary, BLOCK))](
            self.logits, self.targets, *self._numbers(self.head), self.others, self.others_normalisers,
            self.normalisers, self.outputs.entropies, self.outputs.reference_kl,
            by_log_probs, by_entropies, by_kl, BLOCK, num_warps=WARPS,
        )  # fmt: skip
        return self.logits

    def _numbers(self, head: Head) -> tuple[float | None, ...]:
        """Return vocabulary, temperature, and the scales and caps of a head's and the reference's logits."""
        rules = head.rule, (self.spec.against.head if self.spec.against else head).rule
        numbers = (number and float(number) for rule in rules for number in rule)
        return len(head.weight), float(self.spec.temperature), *numbers


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
    logits_at, targets_at, vocabulary, temperature, scale, cap, others_scale, others_cap, others_at,
    others_normalisers_at, normalisers_at, log_probs_at, entropies_at, squares_at, kl_at, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one token per program."""
    row = tl.program_id(0)
    start = row.to(tl.int64) * vocabulary
    own = _capped(tl.load(logits_at + start + tl.load(targets_at + row)), scale, cap) / temperature
    largest, total, weighted, squares, gap = LEAST, 0.0, 0.0, 0.0, 0.0
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
            weighted = shrink * (weighted + (before - largest) * total) + tl.sum(e * below)
        if squares_at is not None:
            squares = shrink * shrink * squares + tl.sum(e * e)
        if kl_at is not None:
            q = _capped(tl.load(others_at + at, here, 0.0), others_scale, others_cap) / temperature
            gap = shrink * gap + tl.sum(tl.where(here, e * (x - q), 0.0))
        total = shrink * total + tl.sum(e)
    log_total = tl.log(total)
    tl.store(normalisers_at + row, largest + log_total)
    tl.store(log_probs_at + row, own - largest - log_total)
    if entropies_at is not None:
        tl.store(entropies_at + row, log_total - weighted / total)
    if squares_at is not None:
        tl.store(squares_at + row, squares / (total * total))
    if kl_at is not None:
        tl.store(kl_at + row, gap / total - (largest + log_total - tl.load(others_normalisers_at + row)))


@triton.jit
def _gradient(
    logits_at, targets_at, vocabulary, temperature, scale, cap, others_scale, others_cap, others_at,
    others_normalisers_at, normalisers_at, entropies_at, kl_at, by_log_probs_at, by_entropies_at, by_kl_at,
    BLOCK: tl.constexpr,
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
        q = _capped(tl.load(others_at + at, here, 0.0), others_scale, others_cap) / temperature
        log_q = q - tl.load(others_normalisers_at + row)
        factor += tl.load(by_kl_at + row) * (log_p - log_q - tl.load(kl_at + row))
    gradient = tl.exp(log_p) * factor + tl.where(columns == tl.load(targets_at + row), by_own, 0.0)
    if cap is not None:
        gradient *= 1 - (capped / cap) * (capped / cap)
    tl.store(logits_at + at, (gradient * scale / temperature).to(logits_at.dtype.element_ty), here)

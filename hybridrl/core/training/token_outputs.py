"""Log-probs and other token outputs from hidden states and a head, without materialising more logits than a chunk's.

Gradients are computed here and not by autograd, so that a chunk's logits and their gradient share their memory.
`LogitTables` computes a chunk with torch's own operations on float32 tables; on CUDA, `logit_kernels.LogitKernels` uses
kernels. Knows neither models nor losses, but a loss can pass in a function that computes its gradient early.

Logits become probabilities, and these become the gradient with respect to the logits, in place. p is the softmax of the
logits and H its entropy; `heads` has the divergences from another model. For a token y, the gradients with respect to
the logit of a token v are

    log p_y:  1[v = y] - p_v        H:  -p_v (log p_v + H)

A token of probability 0, such as one whose logit is masked with -inf, contributes 0 to H.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridrl.config.catalog import Divergence
from hybridrl.core.training.heads import (
    TABLES,
    ComparedTables,
    ComparedTop,
    Head,
    ReferenceOutputs,
    TopTokens,
    below_largest,
    expected,
)
from hybridrl.required import required


# Named tuples: FSDP2 finds tensors in a model's arguments and results, but not with every torch inside dataclasses.
class TokenOutputs(NamedTuple):
    """Outputs for each response token, in float32; None where not requested."""

    log_probs: Tensor  # [response tokens]
    entropies: Tensor | None = None  # [response tokens]
    sum_pi_squared: Tensor | None = None  # [response tokens] sum of squared probabilities; without a gradient
    reference_kl: Tensor | None = None  # [response tokens] exact KL(policy || reference), over the rows of both heads
    teacher_divergence: Tensor | None = None  # [response tokens] exact, over the rows of both heads
    unreached: Tensor | None = None  # [response tokens] mass of the teacher that the policy's samples do not reach

    def map(self, function: Callable[[Tensor], Tensor]) -> "TokenOutputs":
        """Apply a function to the fields that are not None."""
        return TokenOutputs._make(value if value is None else function(value) for value in self)


# Maps the outputs of a span of response tokens to the gradient of a loss with respect to those that require one.
LossGradient = Callable[[TokenOutputs, slice], TokenOutputs]


class OutputSpec(NamedTuple):
    """The outputs to compute in addition to log-probs. All logits are divided by the temperature."""

    temperature: float = 1.0
    entropies: bool = False
    entropy_gradient: bool = False
    sum_pi_squared: bool = False
    against: ReferenceOutputs | None = None
    teacher: ReferenceOutputs | TopTokens | None = None
    divergence: Divergence = Divergence()  # from the teacher
    loss_gradient: LossGradient | None = None

    @property
    def outputs(self) -> tuple[bool, ...]:
        """Return which fields of `TokenOutputs` are requested."""
        teaches = self.teacher is not None
        return True, self.entropies, self.sum_pi_squared, self.against is not None, teaches, teaches

    @property
    def differentiable(self) -> tuple[bool, ...]:
        """Return which fields of `TokenOutputs` have a gradient."""
        return True, self.entropies and self.entropy_gradient, False, *self.outputs[3:5], False

    @property
    def compared(self) -> list[tuple[ReferenceOutputs | TopTokens, Divergence]]:
        """Return the other models, in the order of their fields of `TokenOutputs`, each with its divergence."""
        pairs = (self.against, Divergence()), (self.teacher, self.divergence)
        return [(other, divergence) for other, divergence in pairs if other is not None]

    @property
    def tables(self) -> int:
        """Return how many tables of other models' logits a chunk has."""
        return sum(TABLES[divergence.kind] for _, divergence in self.compared)


class LogitTables:
    """Computes one chunk after another, of at most `tokens` each, in the same memory. The tables [tokens, vocabulary]
    are allocated once for all chunks: on CPU new memory costs time."""

    def __init__(self, head: Head, spec: OutputSpec, tokens: int) -> None:
        rows = len(head.weight)
        self.head, self.spec = head, spec
        self.tables = list(head.weight.new_empty((1 + spec.entropies, tokens, rows), dtype=torch.float32))
        self.compared = [
            ComparedTop(kind, rows)
            if isinstance(other, TopTokens)
            else ComparedTables(other.head, kind, rows, tokens, teaches=other is spec.teacher)
            for other, kind in spec.compared
        ]

    def fill(self, hidden: Tensor, targets: Tensor, others: Sequence[Tensor], *, keep: bool) -> TokenOutputs:
        """Return a chunk's outputs from its hidden states, those of the other models, all [tokens, width], and its
        targets [tokens]. With `keep`, `gradient` can be called until the next chunk."""
        self.targets, spec = targets[:, None], self.spec
        # Where nothing else needs the logits, the probabilities overwrite them.
        first, second = (self.tables[index][: len(targets)] for index in (0, int(spec.entropies)))
        for compared, other in zip(self.compared, others, strict=True):
            compared.read(other, spec.temperature, first)
        logits = self.head.logits(hidden, first)
        self.slopes = self.head.rule.slopes(logits) if keep else None
        own = below_largest(logits, spec.temperature).gather(-1, self.targets)
        for compared in self.compared:
            compared.subtract_from(logits)
        probabilities = torch.exp(logits, out=second)
        sums = probabilities.sum(-1, keepdim=True)
        self.normaliser = sums.log()  # log of the sum, of logits less each token's largest
        log_probs = (own - self.normaliser).squeeze(-1)
        if not keep and not any(spec.outputs[1:]):
            return TokenOutputs(log_probs)
        self.probabilities = probabilities.div_(sums)
        entropies = squares = None
        if spec.entropies:  # the logits are multiplied by the probabilities in place
            self.logits = logits
            entropies = self.normaliser.squeeze(-1) - expected(logits, probabilities)
        if spec.sum_pi_squared:
            squares = torch.linalg.vector_norm(probabilities, dim=-1).square()
        values = iter([compared.diverge(probabilities, self.normaliser) for compared in self.compared])
        kl, divergence = (next(values) if requested else None for requested in spec.outputs[3:5])
        unreached = None if spec.teacher is None else self.compared[-1].unreached
        self.outputs = TokenOutputs(log_probs, entropies, squares, kl, divergence, unreached)
        return self.outputs

    def gradient(self, by: TokenOutputs) -> Tensor:
        """Return the gradient with respect to a chunk's logits [tokens, vocabulary], in the head's type, given the
        gradient with respect to its outputs; can be called once per chunk."""
        by = by.map(lambda value: value[:, None])
        pairs = [*zip(self.compared, (value for value in by[3:5] if value is not None), strict=True)]
        factor = -by.log_probs
        if entropies := self.spec.differentiable[1]:
            own = required(self.outputs.entropies)[:, None]
            factor = factor + required(by.entropies) * (self.normaliser - own)
        for compared, by_divergence in pairs:
            if compared.level is not None:
                factor = factor - by_divergence * compared.level[:, None]
        table = self.probabilities.mul_(factor)
        if entropies:
            table.addcmul_(self.logits, required(by.entropies), value=-1)
        for compared, by_divergence in pairs:
            compared.add_slopes(table, by_divergence)
        table.scatter_add_(-1, self.targets, by.log_probs)
        if self.slopes is not None:
            table.mul_(self.slopes)
        scale = self.head.rule.scale / self.spec.temperature
        return (table if scale == 1 else table.mul_(scale)).to(self.head.weight.dtype)


# -- chunk by chunk ----------------------------------------------------------------------------------------------------

# Size of a chunk's float32 logits. Large on CUDA, as each chunk adds to the head's gradient in the gradient's type: in
# bfloat16 ten chunks leave an error of 0.4% of its norm, a single one of 0.2% (test_linear_log_probs.py).
CHUNK_BYTES = {"cpu": 48 << 20, "cuda": 1 << 30}
# Per chunk, for any vocabulary: each chunk reads the entire head, and reads and writes its entire gradient.
FEWEST_TOKENS = 256
SAME = 1e-5  # gradients that differ by less, relative to their largest number, differ by rounding


def tokens_at_once(device: str, vocabulary: int) -> int:
    """Return how many tokens a chunk has."""
    return max(CHUNK_BYTES[device] // (4 * vocabulary), FEWEST_TOKENS)


def token_outputs(hidden: Tensor, head: Head, targets: Tensor, spec: OutputSpec) -> TokenOutputs:
    """Return the outputs for these targets [N], given the head's inputs `hidden` [N, width]. The backward pass
    computes the logits again, with two exceptions: if one chunk holds them all, they are kept; with an early gradient,
    the gradients that were computed with the outputs are scaled. All are then NaN if the arriving gradient is not a
    multiple of the early one (`Learner.update` repeats the mini-batch without it)."""
    chunks = Chunks(hidden, head, targets, spec)
    if torch.is_grad_enabled():
        return TokenOutputs(*_Differentiable.apply(hidden, head.weight, head.bias, chunks))
    return chunks.fill_all()


_Gradients = list[Tensor | None]  # gradients of hidden states, weight and bias; None where not needed


class Chunks:
    """The outputs of all tokens, computed chunk by chunk, and the gradients that follow from theirs."""

    def __init__(self, hidden: Tensor, head: Head, targets: Tensor, spec: OutputSpec) -> None:
        self.hidden, self.targets, self.spec = hidden.detach(), targets, spec
        self.head = Head(head.weight.detach(), None if head.bias is None else head.bias.detach(), head.rule)
        most = tokens_at_once(hidden.device.type, len(head.weight)) // (1 + spec.tables)
        self.size = max(min(most, len(hidden)), 1)  # a slice of packed rows may have no response token
        self.spans = [slice(start, start + self.size) for start in range(0, len(hidden), self.size)]

    def _joined(self, parts: list[TokenOutputs]) -> TokenOutputs:
        """Return the values of all chunks; without a chunk none of each requested output."""
        if len(parts) == 1:
            return parts[0]
        none = self.hidden.new_zeros(0, dtype=torch.float32)
        columns = zip(*parts, strict=True) if parts else ([none] if want else [None] for want in self.spec.outputs)
        return TokenOutputs._make(None if column[0] is None else torch.cat([*column]) for column in columns)

    def arithmetic(self) -> LogitTables:
        """Return the computation of chunks: by torch's operations, or on CUDA by kernels that read each logit once, but
        for most probable tokens."""
        if self.hidden.device.type != "cuda" or isinstance(self.spec.teacher, TopTokens):
            return LogitTables(self.head, self.spec, self.size)
        from hybridrl.core.training.logit_kernels import LogitKernels  # needs Triton

        return LogitKernels(self.head, self.spec, self.size)

    def fill_all(self) -> TokenOutputs:
        """Return the outputs of all tokens."""
        memory = self.arithmetic()
        return self._joined([self.fill(memory, span, keep=False) for span in self.spans])

    def fill(self, memory: LogitTables, span: slice, *, keep: bool) -> TokenOutputs:
        """Return the outputs of a chunk."""
        others = [other.hidden[span] for other, _ in self.spec.compared]
        return memory.fill(self.hidden[span], self.targets[span], others, keep=keep)

    def gradients(self, needed: tuple[bool, ...], by: TokenOutputs, filled: LogitTables | None) -> _Gradients:
        """Return the gradients given those of the outputs; `filled` is the memory of the only chunk, if it was kept."""
        memory, into = filled or self.arithmetic(), self._memory(needed)
        for span in self.spans:
            if filled is None:
                self.fill(memory, span, keep=True)
            self._add(into, span, memory, by.map(lambda value, span=span: value[span]))
        return into

    def fill_with_gradients(self, needed: tuple[bool, ...]) -> tuple[TokenOutputs, TokenOutputs, _Gradients]:
        """Return all outputs, the early gradient of the loss with respect to them, and those that follow from it."""
        memory, into, learns = self.arithmetic(), self._memory(needed), self.spec.differentiable
        outputs, early = [], []
        for span in self.spans:
            outputs.append(self.fill(memory, span, keep=True))
            pairs = zip(outputs[-1], learns, strict=True)
            leaves = TokenOutputs._make(v if v is None else v.detach().requires_grad_(learn) for v, learn in pairs)
            early.append(required(self.spec.loss_gradient)(leaves, span).map(Tensor.contiguous))
            self._add(into, span, memory, early[-1])
        return self._joined(outputs), self._joined(early), into

    def _memory(self, needed: tuple[bool, ...]) -> _Gradients:
        """Allocate the gradients. Chunks overwrite or add to them; without chunks they are zeros."""
        values = (self.hidden, self.head.weight, self.head.bias)
        make = torch.empty_like if self.spans else torch.zeros_like
        return [make(required(v)) if need else None for v, need in zip(values, needed, strict=True)]

    def _add(self, into: _Gradients, span: slice, filled: LogitTables, by: TokenOutputs) -> None:
        """Add a chunk's share to the gradients. This uses up the contents of `filled`."""
        by_logits = filled.gradient(by)
        hidden, weight, bias = into
        if hidden is not None:
            torch.mm(by_logits, self.head.weight, out=hidden[span])
        if weight is not None:
            weight.addmm_(by_logits.t(), self.hidden[span], beta=int(span.start > 0))
        if bias is not None:
            bias.copy_(by_logits.sum(0) + bias if span.start else by_logits.sum(0))


class _Differentiable(torch.autograd.Function):
    """The outputs as a function of hidden states, weight and bias, which `chunks` holds as well."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, chunks: Chunks) -> tuple:
        ctx.chunks, ctx.filled, ctx.early, ctx.gradients = chunks, None, None, None
        if len(chunks.spans) == 1:
            ctx.filled = chunks.arithmetic()
            outputs = chunks.fill(ctx.filled, chunks.spans[0], keep=True)
        # In float16 only the arriving gradient is scaled so that it does not vanish.
        elif not chunks.spans or chunks.spec.loss_gradient is None or weight.dtype == torch.float16:
            outputs = chunks.fill_all()
        else:
            outputs, ctx.early, ctx.gradients = chunks.fill_with_gradients(ctx.needs_input_grad[:3])
        # Detached copies: a returned tensor references this context, so returning what `filled` holds would leak it.
        outputs = tuple(outputs.map(torch.detach))
        fixed = [v for v, learns in zip(outputs, chunks.spec.differentiable, strict=True) if not learns]
        ctx.mark_non_differentiable(*(value for value in fixed if value is not None))
        return outputs

    @staticmethod
    def backward(ctx: Any, *by: Tensor | None) -> tuple:
        arrived = TokenOutputs._make(by)
        # Both are used up: a second backward pass computes the logits again.
        filled, gradients, ctx.filled, ctx.gradients = ctx.filled, ctx.gradients, None, None
        if gradients is not None:
            factor = _factor(arrived, ctx.early)
            if factor.is_cpu and factor == 1:  # reading it waits for nothing here, and the gradients are large
                return *gradients, None
            return *(value if value is None else value.mul_(factor) for value in gradients), None
        return *ctx.chunks.gradients(ctx.needs_input_grad[:3], arrived, filled), None


def _factor(arrived: TokenOutputs, early: TokenOutputs) -> Tensor:
    """Return the ratio of the arriving gradient to the early one; NaN if it is not a multiple. The host reads none."""
    pairs = [(late, soon) for late, soon in zip(arrived, early, strict=True) if soon is not None]
    late, soon = (torch.cat(values) for values in zip(*pairs, strict=True))
    largest = soon.abs().argmax()
    factor = torch.where(soon.take(largest) == 0, 0.0, late.take(largest) / soon.take(largest))
    multiple = (late - factor * soon).abs().max() <= SAME * late.abs().max()
    return torch.where(multiple, factor, torch.nan)

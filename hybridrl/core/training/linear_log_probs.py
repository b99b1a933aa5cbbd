"""Log-probs and other token outputs from hidden states and a head, without materialising more logits than a chunk's.

Gradients are computed here and not by autograd, so that a chunk's logits and their gradient share their memory. The
arithmetic of a chunk is `token_outputs.LogitTables`, on CUDA `logit_kernels.LogitKernels`.

Knows neither models nor losses, but a loss can pass in a function that computes its gradient early.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from hybridrl.core.required import required
from hybridrl.core.training.token_outputs import Head, LogitTables, OutputSpec, TokenOutputs

# Of float32 logits. Large chunks on CUDA, as each one adds its share to the head's gradient in the gradient's type.
CHUNK_BYTES = {"cpu": 48 << 20, "cuda": 1 << 30}
# Per chunk, however large the vocabulary: each one reads the entire head, and reads and writes its entire gradient.
FEWEST_TOKENS = 256
SAME = 1e-5  # gradients that differ by less, relative to their largest number, differ by rounding


class ChunkMemory(Protocol):
    """The arithmetic of chunks, one after another: see `token_outputs.LogitTables`."""

    def fill(self, hidden: Tensor, targets: Tensor, against: Tensor | None, *, keep: bool) -> TokenOutputs: ...
    def gradient(self, by: TokenOutputs) -> Tensor: ...


def tokens_at_once(device: str, vocabulary: int) -> int:
    """Return how many tokens a chunk has."""
    return max(CHUNK_BYTES[device] // (4 * vocabulary), FEWEST_TOKENS)


def token_outputs(hidden: Tensor, head: Head, targets: Tensor, spec: OutputSpec) -> TokenOutputs:
    """Return the outputs for these targets [N], given what the head sees, `hidden` [N, width]. The backward pass
    computes the logits again, with two exceptions: if one chunk holds them all, they are kept; if the arriving gradient
    is a multiple of the early one, the gradients that were computed with the outputs are scaled."""
    chunks = Chunks(hidden, head, targets, spec)
    if torch.is_grad_enabled():
        return TokenOutputs(*_Differentiable.apply(hidden, head.weight, head.bias, chunks))
    chunks.fill_all()
    return chunks.outputs


_Gradients = list[Tensor | None]  # of hidden states, weight and bias; None where none is needed


class Chunks:
    """The outputs of all tokens, computed chunk by chunk, and the gradients that follow from theirs."""

    def __init__(self, hidden: Tensor, head: Head, targets: Tensor, spec: OutputSpec) -> None:
        self.hidden, self.targets, self.spec = hidden.detach(), targets, spec
        self.head = Head(head.weight.detach(), None if head.bias is None else head.bias.detach(), head.rule)
        most = tokens_at_once(hidden.device.type, len(head.weight)) // (1 if spec.against is None else 2)
        self.size = max(min(most, len(hidden)), 1)  # a slice of packed rows may have no response token
        self.spans = [slice(start, start + self.size) for start in range(0, len(hidden), self.size)]
        self.outputs = self._empty(spec.outputs)

    def _empty(self, wanted: tuple[bool, ...]) -> TokenOutputs:
        zeros = self.hidden.new_zeros(len(wanted), len(self.hidden), dtype=torch.float32)
        return TokenOutputs._make(row if want else None for row, want in zip(zeros, wanted, strict=True))

    def arithmetic(self) -> ChunkMemory:
        """Return what computes chunks: torch's operations, or on CUDA kernels that read each logit once."""
        if self.hidden.device.type != "cuda":
            return LogitTables(self.head, self.spec, self.size)
        from hybridrl.core.training.logit_kernels import LogitKernels  # needs Triton

        return LogitKernels(self.head, self.spec, self.size)

    def fill_all(self) -> None:
        memory = self.arithmetic()
        for span in self.spans:
            self.fill(memory, span, keep=False)

    def fill(self, memory: ChunkMemory, span: slice, *, keep: bool) -> None:
        """Compute the outputs of a chunk."""
        against = None if self.spec.against is None else self.spec.against.hidden[span]
        chunk = memory.fill(self.hidden[span], self.targets[span], against, keep=keep)
        for column, part in zip(self.outputs, chunk, strict=True):
            if column is not None:
                column[span] = required(part)

    def gradients(self, needed: tuple[bool, ...], by: TokenOutputs, filled: ChunkMemory | None) -> _Gradients:
        """Return the gradients given that of the outputs; `filled` is the memory of the only chunk, if it was kept."""
        memory, into = filled or self.arithmetic(), self._zeros(needed)
        for span in self.spans:
            if filled is None:
                self.fill(memory, span, keep=True)
            self._add(into, span, memory, by)
        return into

    def fill_with_gradients(self, needed: tuple[bool, ...]) -> tuple[TokenOutputs, _Gradients]:
        """Compute all outputs together with the early gradient of the loss and the gradients that follow from it."""
        memory, into, early = self.arithmetic(), self._zeros(needed), self._empty(self.spec.differentiable)
        for span in self.spans:
            self.fill(memory, span, keep=True)
            for column, so_far in zip(early, required(self.spec.loss_gradient)(self.outputs), strict=True):
                if column is not None:
                    column[span] = required(so_far)[span]
            self._add(into, span, memory, early)
        return early, into

    def _zeros(self, needed: tuple[bool, ...]) -> _Gradients:
        values = (self.hidden, self.head.weight, self.head.bias)
        return [torch.zeros_like(required(v)) if need else None for v, need in zip(values, needed, strict=True)]

    def _add(self, into: _Gradients, span: slice, filled: ChunkMemory, by: TokenOutputs) -> None:
        """Add a chunk's share, which uses up the contents of `filled`."""
        by_logits = filled.gradient(by.map(lambda value: value[span]))
        hidden, weight, bias = into
        if hidden is not None:
            torch.mm(by_logits, self.head.weight, out=hidden[span])
        if weight is not None:
            weight.addmm_(by_logits.t(), self.hidden[span])
        if bias is not None:
            bias.add_(by_logits.sum(0))


class _Differentiable(torch.autograd.Function):
    """The outputs as a function of hidden states, weight and bias, which `chunks` holds as well."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, chunks: Chunks) -> tuple:
        ctx.chunks, ctx.filled, ctx.early, ctx.gradients = chunks, None, None, None
        if len(chunks.spans) == 1:
            ctx.filled = chunks.arithmetic()
            chunks.fill(ctx.filled, chunks.spans[0], keep=True)
        # In float16 only the arriving gradient is scaled so that it does not vanish.
        elif chunks.spec.loss_gradient is None or weight.dtype == torch.float16:
            chunks.fill_all()
        else:
            ctx.early, ctx.gradients = chunks.fill_with_gradients(ctx.needs_input_grad[:3])
        # Detached copies: what is returned references this context, so returning `chunks.outputs` would leak it.
        outputs = tuple(chunks.outputs.map(torch.detach))
        fixed = [v for v, learns in zip(outputs, chunks.spec.differentiable, strict=True) if not learns]
        ctx.mark_non_differentiable(*(value for value in fixed if value is not None))
        return outputs

    @staticmethod
    def backward(ctx: Any, *by: Tensor | None) -> tuple:
        arrived = TokenOutputs._make(by)
        # Both are used up: a second backward pass computes the logits again.
        filled, gradients, ctx.filled, ctx.gradients = ctx.filled, ctx.gradients, None, None
        factor = None if gradients is None else _factor(arrived, ctx.early)
        if factor is not None:
            return *(value if value is None else value.mul_(factor) for value in gradients), None
        del gradients
        return *ctx.chunks.gradients(ctx.needs_input_grad[:3], arrived, filled), None


def _factor(arrived: TokenOutputs, early: TokenOutputs) -> Tensor | None:
    """Return the factor of the arriving gradient to the early one; None if it is no multiple, e.g. contains a NaN."""
    pairs = [(late, soon) for late, soon in zip(arrived, early, strict=True) if soon is not None]
    late, soon = (torch.cat(values) for values in zip(*pairs, strict=True))
    largest = soon.abs().argmax()
    factor = torch.where(soon[largest] == 0, 0.0, late[largest] / soon[largest])
    return factor if (late - factor * soon).abs().max() <= SAME * late.abs().max() else None

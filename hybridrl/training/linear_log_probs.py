"""Log-probs, and what else is asked of tokens, from what a head sees: no more logits exist than those of a chunk.

Gradients are worked out here and not by autograd, so that a chunk's logits and their gradient share their memory. The
arithmetic of a chunk is in `logit_tables`, on CUDA in `logit_kernels`.

Knows neither models nor losses; but a loss may tell its gradient in advance.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hybridrl.training.logit_tables import LogitTables
from hybridrl.training.token_outputs import Asked, Foresight, Head, TokenOutputs

# Of logits, as if in float32. On CUDA few large chunks: each adds its share to the head's gradient in that one's type.
CHUNK_BYTES = {"cpu": 48 << 20, "cuda": 1 << 30}
# In a chunk, however large the vocabulary: each one reads the whole head, and reads and writes its whole gradient.
FEWEST_TOKENS = 256
SAME = 1e-5  # Gradients that differ by less, relative to the largest number in them, differ by rounding.


def tokens_at_once(device: str, vocabulary: int) -> int:
    """How many tokens a chunk has."""
    return max(CHUNK_BYTES[device] // (4 * vocabulary), FEWEST_TOKENS)


class Arithmetic(Protocol):
    """The memory for one chunk after another, at most `tokens` each, and what is computed in it."""

    def __init__(self, head: Head, asked: Asked, tokens: int) -> None: ...

    def fill(self, hidden: Tensor, targets: Tensor, against: Tensor | None, *, learning: bool) -> TokenOutputs:
        """The outputs of a chunk's hidden states [tokens, width], the reference's too, and targets [tokens]; where they
        are learnt from, what `gradient` needs is kept until the next chunk."""

    def gradient(self, by: TokenOutputs) -> Tensor:
        """The gradient by a chunk's logits [tokens, vocabulary], in the head's type, from that by its outputs; once."""


def arithmetic(device: str) -> type[Arithmetic]:
    """Torch's operations, or on CUDA kernels that read a logit once."""
    if device == "cpu":
        return LogitTables
    from hybridrl.training.logit_kernels import LogitKernels

    return LogitKernels


def token_outputs(hidden: Tensor, head: Head, targets: Tensor, asked: Asked) -> TokenOutputs:
    """Of these targets [N], where the head sees `hidden` [N, width].

    In the backward pass logits are formed again; but not where one chunk holds them all, nor where the gradient that
    arrives is a multiple of the one foreseen: then those of hidden states and head were formed with the outputs.
    """
    chunks = _Chunks(hidden, head, targets, asked)
    if torch.is_grad_enabled():
        return TokenOutputs(*_Differentiable.apply(hidden, head.weight, head.bias, chunks))
    chunks.fill_all()
    return chunks.outputs


class _Gradients(NamedTuple):
    """None where none is needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class _Chunks:
    """The outputs of all tokens, filled chunk by chunk, and gradients from theirs."""

    def __init__(self, hidden: Tensor, head: Head, targets: Tensor, asked: Asked) -> None:
        weight, bias = head.weight.detach(), None if head.bias is None else head.bias.detach()
        self.hidden, self.head, self.targets, self.asked = (
            hidden.detach(),
            Head(weight, bias, head.rule),
            targets,
            asked,
        )
        most = tokens_at_once(hidden.device.type, len(weight)) // (1 if asked.against is None else 2)
        self.size = max(min(most, len(hidden)), 1)  # a slice of a line may have no response token
        self.spans = [slice(start, start + self.size) for start in range(0, len(hidden), self.size)]
        self.outputs = self._outputs(asked.outputs)

    def _outputs(self, wanted: tuple[bool, ...]) -> TokenOutputs:
        zeros = self.hidden.new_zeros(len(wanted), len(self.hidden), dtype=torch.float32)
        return TokenOutputs(*(row if want else None for row, want in zip(zeros, wanted, strict=True)))

    def arithmetic(self) -> Arithmetic:
        return arithmetic(self.hidden.device.type)(self.head, self.asked, self.size)

    def fill_all(self) -> None:
        memory = self.arithmetic()
        for span in self.spans:
            self.fill(memory, span, learning=False)

    def fill(self, memory: Arithmetic, span: slice, *, learning: bool) -> None:
        """The outputs of a chunk."""
        against = None if self.asked.against is None else self.asked.against.hidden[span]
        found = memory.fill(self.hidden[span], self.targets[span], against, learning=learning)
        for whole, part in zip(self.outputs, found, strict=True):
            if whole is not None:
                whole[span] = part

    def gradients(self, needed: tuple[bool, ...], by: TokenOutputs, filled: Arithmetic | None) -> _Gradients:
        """From the gradient by the outputs; `filled` has what belongs to the only chunk, if it was kept."""
        memory, into = filled or self.arithmetic(), self._zeros(needed)
        for span in self.spans:
            if filled is None:
                self.fill(memory, span, learning=True)
            self._add(into, span, memory, by)
        return into

    def fill_foreseeing(self, needed: tuple[bool, ...], foresight: Foresight) -> tuple[TokenOutputs, _Gradients]:
        """All outputs, and with them the gradient that is foreseen by these, and what follows from it."""
        memory, into, foreseen = self.arithmetic(), self._zeros(needed), self._outputs(self.asked.learnt)
        for span in self.spans:
            self.fill(memory, span, learning=True)
            for whole, so_far in zip(foreseen, foresight(self.outputs), strict=True):
                if whole is not None:
                    whole[span] = so_far[span]
            self._add(into, span, memory, foreseen)
        return foreseen, into

    def _zeros(self, needed: tuple[bool, ...]) -> _Gradients:
        values = (self.hidden, self.head.weight, self.head.bias)
        return _Gradients(*(torch.zeros_like(v) if need else None for v, need in zip(values, needed, strict=True)))

    def _add(self, into: _Gradients, span: slice, filled: Arithmetic, by: TokenOutputs) -> None:
        """A chunk's share, which uses up what it was filled with."""
        by_logits = filled.gradient(TokenOutputs(*(value if value is None else value[span] for value in by)))
        if into.hidden is not None:
            torch.mm(by_logits, self.head.weight, out=into.hidden[span])
        if into.weight is not None:
            into.weight.addmm_(by_logits.t(), self.hidden[span])
        if into.bias is not None:
            into.bias.add_(by_logits.sum(0))


class _Differentiable(torch.autograd.Function):
    """The outputs as a function of hidden states, weight and bias, which `chunks` has too."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, chunks: _Chunks) -> tuple:
        ctx.chunks, ctx.filled, ctx.foreseen, ctx.formed = chunks, None, None, None
        foresight = chunks.asked.foresight
        if len(chunks.spans) == 1:
            ctx.filled = chunks.arithmetic()
            chunks.fill(ctx.filled, chunks.spans[0], learning=True)
        # Where float16 computes, only the gradient that arrives is scaled so that it does not vanish.
        elif foresight is None or weight.dtype == torch.float16:
            chunks.fill_all()
        else:
            ctx.foreseen, ctx.formed = chunks.fill_foreseeing(ctx.needs_input_grad[:3], foresight)
        # Not those that `chunks` has: what is returned knows of this context, which would never be freed.
        outputs = tuple(value if value is None else value.detach() for value in chunks.outputs)
        told = zip(outputs, chunks.asked.learnt, strict=True)
        ctx.mark_non_differentiable(*(value for value, learnt in told if value is not None and not learnt))
        return outputs

    @staticmethod
    def backward(ctx: Any, *by: Tensor | None) -> tuple:
        arrived = TokenOutputs(*by)
        # Both are used up: a second time logits are formed again.
        filled, formed, ctx.filled, ctx.formed = ctx.filled, ctx.formed, None, None
        factor = None if formed is None else _factor(arrived, ctx.foreseen)
        if factor is not None:
            return *(value if value is None else value.mul_(factor) for value in formed), None
        del formed
        return *ctx.chunks.gradients(ctx.needs_input_grad[:3], arrived, filled), None


def _factor(arrived: TokenOutputs, foreseen: TokenOutputs) -> Tensor | None:
    """What the gradient that arrived is of the other; None where it is no multiple, as with a NaN in it."""
    pairs = [(one, other) for one, other in zip(arrived, foreseen, strict=True) if other is not None]
    one, other = (torch.cat(values) for values in zip(*pairs, strict=True))
    place = other.abs().argmax()
    factor = torch.where(other[place] == 0, 0.0, one[place] / other[place])
    return factor if (one - factor * other).abs().max() <= SAME * one.abs().max() else None

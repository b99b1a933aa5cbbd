"""Log-probs, and what else is asked of tokens, from what a head sees: no more logits exist than those of a chunk.

Gradients are worked out here and not by autograd, so that logits become probabilities, and these the gradient by the
logits, where they lie. Of a token y, with p the softmax of the logits, the entropy H, and KL = KL(p || q):

    log p_y:  1[v = y] - p_v        H:  -p_v (log p_v + H)        KL:  p_v (log p_v - log q_v - KL)

Knows neither models nor losses; but a loss may tell its gradient in advance.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridrl.training.token_outputs import Asked, Foresight, Head, TokenOutputs

# Of float32 logits. On CUDA few large chunks: each adds its share to the head's gradient in that gradient's own type.
CHUNK_BYTES = {"cpu": 48 << 20, "cuda": 1 << 30}
# In a chunk, however large the vocabulary: each one reads the whole head, and reads and writes its whole gradient.
FEWEST_TOKENS = 256
SAME = 1e-5  # Gradients that differ by less, relative to the largest number in them, differ by rounding.


def tokens_at_once(device: str, vocabulary: int) -> int:
    """How many tokens a chunk has."""
    return max(CHUNK_BYTES[device] // (4 * vocabulary), FEWEST_TOKENS)


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


class _Filled(NamedTuple):
    """What the gradient of a chunk's outputs is made of; tables are [tokens of the chunk, vocabulary]."""

    probabilities: Tensor
    normaliser: Tensor  # [tokens of the chunk, 1], of logits less each token's largest
    logits: Tensor | None  # these, times the probabilities; for entropies
    gaps: Tensor | None  # log p - log q, times the probabilities; for the KL
    slopes: Tensor | None  # of the logits' cap


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

    def rooms(self) -> list[Tensor]:
        """Memory for tables, used for one chunk after another: on CPU fresh memory costs time."""
        count = 1 + self.asked.entropies + (self.asked.against is not None)
        shape = (count, self.size, len(self.head.weight))
        return list(self.hidden.new_empty(shape, dtype=torch.float32))

    def fill_all(self) -> None:
        rooms = self.rooms()
        for span in self.spans:
            self.fill(span, rooms, learning=False)

    def fill(self, span: slice, rooms: list[Tensor], *, learning: bool) -> _Filled | None:
        """The outputs of a chunk; where they are learnt from, what their gradient is made of."""
        targets, against, slopes, gaps = self.targets[span, None], self.asked.against, None, None
        # Where nothing else needs the logits, the probabilities take their place.
        first, second, last = (rooms[place][: len(targets)] for place in (0, int(self.asked.entropies), -1))
        if against is not None:
            others = self._below_largest(against.head.logits(against.hidden[span], last))
            others_normaliser = torch.exp(others, out=first).sum(-1, keepdim=True).log()
        logits = self.head.logits(self.hidden[span], first)
        if learning:
            slopes = self.head.rule.slopes(logits)
        own = self._below_largest(logits).gather(-1, targets)
        if against is not None:
            gaps = torch.sub(logits, others, out=last)
        probabilities = torch.exp(logits, out=second)
        sums = probabilities.sum(-1, keepdim=True)
        normaliser = sums.log()
        self.outputs.log_probs[span] = (own - normaliser).squeeze(-1)
        if not learning and not any(self.asked.outputs[1:]):
            return None
        if against is not None:
            gaps.add_(others_normaliser - normaliser)
        filled = _Filled(probabilities.div_(sums), normaliser, logits if self.asked.entropies else None, gaps, slopes)
        self._sum(span, filled)
        return filled

    def _below_largest(self, logits: Tensor) -> Tensor:
        """Over the temperature, less each token's largest; in place."""
        if self.asked.temperature != 1:
            logits.div_(self.asked.temperature)
        return logits.sub_(logits.amax(-1, keepdim=True))

    def _sum(self, span: slice, filled: _Filled) -> None:
        """The outputs that are sums over the vocabulary; in place logits and gaps are weighted with probabilities."""
        outputs, probabilities = self.outputs, filled.probabilities
        if outputs.entropies is not None:
            expected = filled.logits.mul_(probabilities).sum(-1)
            outputs.entropies[span] = filled.normaliser.squeeze(-1) - expected
        if outputs.reference_kl is not None:
            outputs.reference_kl[span] = filled.gaps.mul_(probabilities).sum(-1)
        if outputs.sum_pi_squared is not None:
            outputs.sum_pi_squared[span] = torch.linalg.vector_norm(probabilities, dim=-1).square()

    def gradients(self, needed: tuple[bool, ...], by: TokenOutputs, filled: _Filled | None) -> _Gradients:
        """From the gradient by the outputs; `filled` is what the only chunk was filled with, if it was kept."""
        rooms, into = [] if filled else self.rooms(), self._zeros(needed)
        for span in self.spans:
            self._add(into, span, filled or self.fill(span, rooms, learning=True), by)
        return into

    def fill_foreseeing(self, needed: tuple[bool, ...], foresight: Foresight) -> tuple[TokenOutputs, _Gradients]:
        """All outputs, and with them the gradient that is foreseen by these, and what follows from it."""
        rooms, into, foreseen = self.rooms(), self._zeros(needed), self._outputs(self.asked.learnt)
        for span in self.spans:
            filled = self.fill(span, rooms, learning=True)
            for whole, so_far in zip(foreseen, foresight(self.outputs), strict=True):
                if whole is not None:
                    whole[span] = so_far[span]
            self._add(into, span, filled, foreseen)
        return foreseen, into

    def _zeros(self, needed: tuple[bool, ...]) -> _Gradients:
        values = (self.hidden, self.head.weight, self.head.bias)
        return _Gradients(*(torch.zeros_like(v) if need else None for v, need in zip(values, needed, strict=True)))

    def _add(self, into: _Gradients, span: slice, filled: _Filled, by: TokenOutputs) -> None:
        """A chunk's share, which uses up what it was filled with."""
        table = self._by_logits(span, filled, by).to(self.head.weight.dtype)
        if into.hidden is not None:
            torch.mm(table, self.head.weight, out=into.hidden[span])
        if into.weight is not None:
            into.weight.addmm_(table.t(), self.hidden[span])
        if into.bias is not None:
            into.bias.add_(table.sum(0))

    def _by_logits(self, span: slice, filled: _Filled, by: TokenOutputs) -> Tensor:
        """The gradient by the head's logits: p_v times a number of the token, and further tables with a factor each."""
        _, entropies, _, kl = self.asked.learnt
        outputs, by = (TokenOutputs(*(v if v is None else v[span, None] for v in of)) for of in (self.outputs, by))
        factor = -by.log_probs
        if entropies:
            factor = factor + by.entropies * (filled.normaliser - outputs.entropies)
        if kl:
            factor = factor - by.reference_kl * outputs.reference_kl
        table = filled.probabilities.mul_(factor)
        if entropies:
            table.addcmul_(filled.logits, by.entropies, value=-1)
        if kl:
            table.addcmul_(filled.gaps, by.reference_kl)
        table.scatter_add_(-1, self.targets[span, None], by.log_probs)
        if filled.slopes is not None:
            table.mul_(filled.slopes)
        scale = self.head.rule.scale / self.asked.temperature
        return table if scale == 1 else table.mul_(scale)


class _Differentiable(torch.autograd.Function):
    """The outputs as a function of hidden states, weight and bias, which `chunks` has too."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, chunks: _Chunks) -> tuple:
        ctx.chunks, ctx.filled, ctx.foreseen, ctx.formed = chunks, None, None, None
        foresight = chunks.asked.foresight
        if len(chunks.spans) == 1:
            ctx.filled = chunks.fill(chunks.spans[0], chunks.rooms(), learning=True)
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

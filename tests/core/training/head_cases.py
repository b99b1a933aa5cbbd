"""Cases of a head, and their outputs from full logits, in float64, differentiated by autograd."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from hybridrl.config.catalog import Divergence
from hybridrl.core.training import heads
from hybridrl.core.training import token_outputs as module
from hybridrl.core.training.heads import Head, LogitRule, ReferenceOutputs, TopTokens
from hybridrl.core.training.token_outputs import OutputSpec, TokenOutputs, token_outputs
from hybridrl.required import required

TOKENS, WIDTH, VOCABULARY = 9, 5, 13
PLAIN = LogitRule()
LEAST = -1e9  # instead of -inf, so that times a probability of 0 it is 0
MASKED = (0, 1, 2, 3, 7, 12)  # the whole first block of the kernels' tests among them


class Case(NamedTuple):
    hidden: Tensor
    head: Head
    targets: Tensor
    spec: OutputSpec

    @property
    def inputs(self) -> list[Tensor]:
        return [value for value in (self.hidden, self.head.weight, self.head.bias) if value is not None]

    def outputs(self) -> TokenOutputs:
        return token_outputs(self.hidden, self.head, self.targets, self.spec)


def case(
    seed: int = 0,
    *,
    bias: bool = False,
    against: bool = False,
    rule: LogitRule = PLAIN,
    other_rows: int = VOCABULARY,
    masked: tuple[int, ...] = (),
    other_masked: tuple[int, ...] = (),
    divergence: Divergence | None = None,
    teacher_rows: int = VOCABULARY,
    **options,
) -> Case:
    """A case in which the reference has `other_rows`, and these tokens' logits are -inf; with a divergence, there is a
    teacher, too."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).requires_grad_()

    def head_of(rows: int, rule: LogitRule, masked: tuple[int, ...]) -> Head:
        weight, values = draw(rows, WIDTH), draw(rows) if bias or masked else None
        if masked and values is not None:
            values.data[list(masked)] = -torch.inf
        return Head(weight, values, rule)

    head, other = head_of(VOCABULARY, rule, masked), head_of(other_rows, LogitRule(0.5), other_masked)
    reference = ReferenceOutputs(draw(TOKENS, WIDTH), other) if against else None
    present = torch.tensor([token for token in range(VOCABULARY) if token not in masked])
    targets = present[torch.randint(len(present), (TOKENS,), generator=generator)]
    hidden = draw(TOKENS, WIDTH)
    if divergence is not None:
        teacher = ReferenceOutputs(draw(TOKENS, WIDTH + 2), Head(draw(teacher_rows, WIDTH + 2), None, LogitRule(0.7)))
        if divergence.kind == "forward_kl_topk":
            teacher = top_of((teacher.hidden @ teacher.head.weight.T).log_softmax(-1).detach(), 3)
        options |= {"teacher": teacher, "divergence": divergence}
    return Case(hidden, head, targets, OutputSpec(against=reference, **options))


def full(of: Case) -> TokenOutputs:
    """By the formulas."""

    def logits_of(hidden: Tensor, head: Head) -> Tensor:
        logits = hidden.double() @ head.weight.double().T * head.rule.scale
        if head.bias is not None:
            logits = logits + head.bias.double() * head.rule.scale
        if head.rule.cap is not None:
            logits = head.rule.cap * torch.tanh(logits / head.rule.cap)
        return logits / of.spec.temperature

    def both(other: ReferenceOutputs) -> tuple[Tensor, Tensor]:
        rows = min(len(of.head.weight), len(other.head.weight))
        log_q = logits_of(other.hidden, other.head)[:, :rows].log_softmax(-1).detach()
        return logits[:, :rows].log_softmax(-1), log_q

    def divergence(other: ReferenceOutputs, kind: Divergence) -> Tensor:
        return diverge(*both(other), kind)

    def unreached(other: ReferenceOutputs) -> Tensor:
        p, q = (values.detach().exp() for values in both(other))
        return (q * (p < heads.UNREACHED)).sum(-1)

    logits, against, teacher = logits_of(of.hidden, of.head), of.spec.against, of.spec.teacher
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    entropies, squares = -(p * log_p.clamp(min=LEAST)).sum(-1), p.square().sum(-1).detach()
    return TokenOutputs(
        log_p.gather(-1, of.targets[:, None]).squeeze(-1),
        entropies if of.spec.entropies else None,
        squares if of.spec.sum_pi_squared else None,
        None if against is None else divergence(against, Divergence()),
        None
        if teacher is None
        else of_top(log_p, teacher, of.spec.divergence.least)
        if isinstance(teacher, TopTokens)
        else divergence(teacher, of.spec.divergence),
        None
        if teacher is None
        else top_unreached(log_p.detach().exp(), teacher)
        if isinstance(teacher, TopTokens)
        else unreached(teacher),
    )


def top_of(log_q: Tensor, count: int) -> TopTokens:
    """The most probable tokens of a teacher."""
    values, ids = log_q.topk(count)
    return TopTokens(torch.stack([ids.int(), values.view(torch.int32)], -1))


def of_top(log_p: Tensor, top: TopTokens, least: float | None) -> Tensor:
    """The forward KL over a teacher's most probable tokens and all others as one, a token at a time."""
    values = []
    for own, table in zip(log_p, top.hidden, strict=True):
        known = table[table[:, 0] < len(own)]
        ids, log_q = known[:, 0].long(), known[:, 1].contiguous().view(torch.float32).double()
        p, q = own[ids].exp(), log_q.exp()
        rest_p, rest_q = 1 - p.sum(), 1 - q.sum()
        value = (q * (log_q - own[ids].clamp(min=LEAST if least is None else least))).sum() + rest_q * (
            rest_q.log() - rest_p.log()
        )
        values.append(value)
    return torch.stack(values)


def top_unreached(p: Tensor, top: TopTokens) -> Tensor:
    """The same as of all tokens, over the most probable ones."""
    ids, log_q = top.hidden[..., 0].long(), top.hidden[..., 1].contiguous().view(torch.float32)
    known = ids < p.shape[-1]
    return (log_q.exp() * (known & (p.gather(-1, ids.clamp(max=p.shape[-1] - 1)) < heads.UNREACHED))).sum(-1).double()


def diverge(log_p: Tensor, log_q: Tensor, kind: Divergence) -> Tensor:
    """The divergence of p from q, by its definition."""
    p, q = log_p.exp(), log_q.exp()
    if kind.kind == "jsd":
        log_m = (kind.beta * q + (1 - kind.beta) * p).log()
        return kind.beta * _kl(q, log_q, log_m) + (1 - kind.beta) * _kl(p, log_p, log_m)
    return _kl(p, log_p, log_q) if kind.kind == "reverse_kl" else _kl(q, log_q, log_p)


def _kl(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    return (p * (log_p.clamp(min=LEAST) - log_q.clamp(min=LEAST))).sum(-1)


def loss(outputs: TokenOutputs, span: slice = slice(None)) -> Tensor:
    """A nonlinear sum over all outputs of a span, with a different weight for each token."""
    weights = torch.linspace(-1, 2, TOKENS)
    terms = [(0.1 * value).exp() * weights.roll(k)[span] for k, value in enumerate(outputs) if value is not None]
    return torch.stack(terms).sum()


def loss_gradient(outputs: TokenOutputs, span: slice) -> TokenOutputs:
    present = [value for value in outputs if value is not None and value.requires_grad]
    with torch.enable_grad():
        gradients = iter(torch.autograd.grad(loss(outputs, span), present))
    learned = (value is not None and value.requires_grad for value in outputs)
    return TokenOutputs(*(next(gradients) if each else None for each in learned))


def gradients(of: Case, of_loss: Callable[[TokenOutputs], Tensor] = loss) -> tuple[Tensor, ...]:
    return torch.autograd.grad(of_loss(of.outputs()), of.inputs)


def chunks_of(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.CHUNK_BYTES, "cpu", 0)
    monkeypatch.setattr(module, "FEWEST_TOKENS", tokens)
    monkeypatch.setattr(heads, "UNREACHED", 0.03)
    monkeypatch.setattr(heads, "MEASURED", 1)  # each token


def check(made: Case) -> None:
    """Assert that outputs and gradients match full logits."""
    outputs, right = made.outputs(), full(made)
    for value, expected in zip(outputs, right, strict=True):
        assert (value is None) == (expected is None)
        if value is not None:
            torch.testing.assert_close(value, required(expected).float(), atol=1e-5, rtol=1e-5)
    expected = torch.autograd.grad(loss(right), made.inputs)
    torch.testing.assert_close(torch.autograd.grad(loss(outputs), made.inputs), expected, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        assert all(a is b or torch.equal(a, b) for a, b in zip(made.outputs(), outputs, strict=True))

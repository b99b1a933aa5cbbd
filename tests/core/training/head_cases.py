"""Cases of a head, and their outputs from full logits, in float64, differentiated by autograd."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from hybridrl.core.required import required
from hybridrl.core.training import token_outputs as module
from hybridrl.core.training.token_outputs import (
    Head,
    LogitRule,
    OutputSpec,
    ReferenceOutputs,
    TokenOutputs,
    token_outputs,
)

TOKENS, WIDTH, VOCABULARY = 9, 5, 13
PLAIN = LogitRule()


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


def case(seed: int = 0, *, bias: bool = False, against: bool = False, rule: LogitRule = PLAIN, **options) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).requires_grad_()

    head, other = (Head(draw(VOCABULARY, WIDTH), draw(VOCABULARY) if bias else None, r) for r in (rule, LogitRule(0.5)))
    reference = ReferenceOutputs(draw(TOKENS, WIDTH), other) if against else None
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return Case(draw(TOKENS, WIDTH), head, targets, OutputSpec(against=reference, **options))


def full(of: Case) -> TokenOutputs:
    """By the formulas."""

    def log_softmax(hidden: Tensor, head: Head) -> Tensor:
        logits = hidden.double() @ head.weight.double().T * head.rule.scale
        if head.bias is not None:
            logits = logits + head.bias.double() * head.rule.scale
        if head.rule.cap is not None:
            logits = head.rule.cap * torch.tanh(logits / head.rule.cap)
        return (logits / of.spec.temperature).log_softmax(-1)

    log_p, against = log_softmax(of.hidden, of.head), of.spec.against
    p = log_p.exp()
    kl = None if against is None else (p * (log_p - log_softmax(against.hidden, against.head).detach())).sum(-1)
    entropies, squares = -(p * log_p).sum(-1), p.square().sum(-1).detach()
    return TokenOutputs(
        log_p.gather(-1, of.targets[:, None]).squeeze(-1),
        entropies if of.spec.entropies else None,
        squares if of.spec.sum_pi_squared else None,
        kl,
    )


def loss(outputs: TokenOutputs) -> Tensor:
    """A nonlinear sum over all outputs, with a different weight for each token."""
    weights = torch.linspace(-1, 2, TOKENS)
    terms = [(0.1 * value).exp() * weights.roll(k) for k, value in enumerate(outputs) if value is not None]
    return torch.stack(terms).sum()


def loss_gradient(outputs: TokenOutputs) -> TokenOutputs:
    with torch.enable_grad():
        leaves = [value if value is None else value.detach().requires_grad_() for value in outputs]
        present = [value for value in leaves if value is not None]
        gradients = iter(torch.autograd.grad(loss(TokenOutputs(*leaves)), present))
    return TokenOutputs(*(value if value is None else next(gradients) for value in leaves))


def gradients(of: Case, of_loss: Callable[[TokenOutputs], Tensor] = loss) -> tuple[Tensor, ...]:
    return torch.autograd.grad(of_loss(of.outputs()), of.inputs)


def chunks_of(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.CHUNK_BYTES, "cpu", 0)
    monkeypatch.setattr(module, "FEWEST_TOKENS", tokens)


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

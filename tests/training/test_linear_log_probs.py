"""Log-probs, entropies and KL chunk by chunk, against logits that are formed whole."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrl.training.linear_log_probs import tokens_at_once
from hybridrl.training.token_outputs import Asked, Head, LogitRule, TokenOutputs
from tests.training.head_cases import TOKENS, VOCABULARY, Case, case, check, chunks_of, foresight, gradients, loss


class Products(TorchDispatchMode):
    """Counts matrix products by whether they make logits [chunk, vocabulary], hidden states' gradient or the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.made = {"logits": 0, "hidden": 0, "head": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            rows, columns = result.shape
            self.made["logits" if columns == VOCABULARY else "head" if rows == VOCABULARY else "hidden"] += 1
        return result


def products(of: Case, of_loss: Callable[[TokenOutputs], Tensor] = loss) -> list[int]:
    with Products() as counted:
        of_loss(of.found()).backward()
    return list(counted.made.values())


@pytest.mark.parametrize("foreseen", [None, foresight], ids=["formed again", "foreseen"])
@pytest.mark.parametrize("tokens", [1, 4, 100])
@given(
    seed=st.integers(0, 1000),
    bias=st.booleans(),
    against=st.booleans(),
    rule=st.builds(LogitRule, st.sampled_from([1.0, 0.3]), st.sampled_from([None, 2.0])),
    temperature=st.sampled_from([1.0, 0.6]),
    entropies=st.booleans(),
    sum_pi_squared=st.booleans(),
)
def test_outputs_and_gradients_are_those_of_whole_logits(foreseen, tokens, seed, **options):
    with pytest.MonkeyPatch.context() as patch:
        chunks_of(tokens, patch)
        check(case(seed, entropy_gradient=True, foresight=foreseen, **options))


def test_logits_are_formed_once_where_the_gradient_was_foreseen_and_else_twice(monkeypatch):
    chunks_of(4, monkeypatch)
    assert products(case()) == [6, 3, 3]
    assert products(case(foresight=foresight)) == [3, 3, 3]


def test_logits_of_a_single_chunk_are_formed_once_for_any_loss():
    assert products(case()) == [1, 1, 1]


@pytest.mark.parametrize("factor", [-3.0, 0.0, 2.0**16])
def test_a_multiple_of_the_gradient_that_was_foreseen_needs_no_more_logits(factor, monkeypatch):
    chunks_of(4, monkeypatch)
    right = gradients(case(), lambda said: factor * loss(said))
    made = case(foresight=foresight)
    assert products(made, lambda said: factor * loss(said)) == [3, 3, 3]
    torch.testing.assert_close(tuple(value.grad for value in made.inputs), right)


def test_a_loss_without_any_gradient_is_foreseen_too(monkeypatch):
    chunks_of(4, monkeypatch)
    made = case(foresight=lambda said: TokenOutputs(torch.zeros(TOKENS)))
    assert products(made, lambda said: 0 * said.log_probs.sum()) == [3, 3, 3]
    assert not any(value.grad.any() for value in made.inputs)


@pytest.mark.parametrize("options", [{}, {"entropies": True, "entropy_gradient": True}, {"against": True}])
def test_a_gradient_that_was_not_foreseen_is_right_nevertheless(options, monkeypatch):
    chunks_of(4, monkeypatch)

    def other(said: TokenOutputs) -> Tensor:
        last = [value for value in said if value is not None][-1]
        return loss(said) + last.sum().square()

    made = case(foresight=foresight, **options)
    torch.testing.assert_close(gradients(made, other), gradients(case(**options), other))
    assert products(made, other)[0] == products(case(**options), other)[0]


def test_a_gradient_that_is_not_finite_arrives(monkeypatch):
    chunks_of(4, monkeypatch)
    found = gradients(case(foresight=foresight), lambda said: loss(said) * torch.nan)
    assert all(value.isnan().all() for value in found)


def test_the_gradient_can_be_taken_twice(monkeypatch):
    for tokens in (4, 100):
        chunks_of(tokens, monkeypatch)
        made = case(foresight=foresight)
        total = loss(made.found())
        once, twice = (torch.autograd.grad(total, made.inputs, retain_graph=True) for _ in range(2))
        torch.testing.assert_close(once, twice)


@pytest.mark.parametrize("foreseen", [None, foresight])
def test_a_frozen_head_has_no_gradient_and_costs_none(foreseen, monkeypatch):
    chunks_of(4, monkeypatch)
    right = gradients(case())[0]
    made = case(foresight=foreseen)
    made.head.weight.requires_grad_(False)
    assert products(made)[1:] == [3, 0]
    torch.testing.assert_close(made.hidden.grad, right)
    assert made.head.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_logits_are_rounded_and_nothing_after_them(dtype, monkeypatch):
    chunks_of(4, monkeypatch)
    full = case()
    hidden, weight = (value.detach().to(dtype).requires_grad_() for value in (full.hidden, full.head.weight))
    made = Case(hidden, Head(weight), full.targets, Asked(foresight=foresight))
    found = made.found()
    logits = hidden @ weight.T
    right = logits.float().log_softmax(-1).gather(-1, full.targets[:, None]).squeeze(-1)
    torch.testing.assert_close(found.log_probs, right)
    expected = torch.autograd.grad(loss(TokenOutputs(right)), made.inputs)
    torch.testing.assert_close(torch.autograd.grad(loss(found), made.inputs), expected, atol=0.02, rtol=0.02)


def test_in_float16_a_gradient_that_would_vanish_unscaled_is_formed_as_it_arrives(monkeypatch):
    chunks_of(4, monkeypatch)
    full, tiny = case(), 1e-9

    def half(foreseen):
        hidden, weight = (value.detach().half().requires_grad_() for value in (full.hidden, full.head.weight))
        return Case(hidden, Head(weight), full.targets, Asked(foresight=foreseen))

    made = half(lambda said: TokenOutputs(torch.full((TOKENS,), tiny)))
    found = gradients(made, lambda said: 2.0**16 * tiny * said.log_probs.sum())
    torch.testing.assert_close(found, gradients(half(None), lambda said: 2.0**16 * tiny * said.log_probs.sum()))
    assert found[0].any()


def test_a_chunk_has_so_many_bytes_of_logits_but_tokens_enough_for_a_large_vocabulary():
    assert tokens_at_once("cpu", 2**14) == 48 * 2**20 // 2**16
    assert tokens_at_once("cpu", 2**20) == 256
    assert tokens_at_once("cuda", 2**17) == 2048

"""Log-probs, entropies and KL chunk by chunk, compared with fully materialised logits."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrl.config.catalog import Divergence
from hybridrl.core.training import heads
from hybridrl.core.training.heads import Head, LogitRule, ReferenceOutputs
from hybridrl.core.training.token_outputs import OutputSpec, TokenOutputs, token_outputs, tokens_at_once
from hybridrl.required import required
from tests.core.training.head_cases import (
    MASKED,
    TOKENS,
    VOCABULARY,
    Case,
    case,
    check,
    chunks_of,
    full,
    gradients,
    loss,
    loss_gradient,
    top_of,
)


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
        of_loss(of.outputs()).backward()
    return list(counted.made.values())


@pytest.mark.parametrize("early", [None, loss_gradient], ids=["recomputed", "early"])
@pytest.mark.parametrize("tokens", [1, 4, 100])
@given(
    seed=st.integers(0, 1000),
    bias=st.booleans(),
    against=st.booleans(),
    rule=st.builds(LogitRule, st.sampled_from([1.0, 0.3]), st.sampled_from([None, 2.0])),
    temperature=st.sampled_from([1.0, 0.5]),
    entropies=st.booleans(),
    sum_pi_squared=st.booleans(),
)
def test_outputs_and_gradients_match_full_logits(early, tokens, seed, **options):
    with pytest.MonkeyPatch.context() as patch:
        chunks_of(tokens, patch)
        check(case(seed, entropy_gradient=True, loss_gradient=early, **options))


@pytest.mark.parametrize("early", [None, loss_gradient], ids=["recomputed", "early"])
@given(
    seed=st.integers(0, 1000),
    other_rows=st.sampled_from([VOCABULARY - 6, VOCABULARY + 4]),
    tokens=st.sampled_from([1, 4, 100]),
    bias=st.booleans(),
    rule=st.builds(LogitRule, st.sampled_from([1.0, 0.3]), st.sampled_from([None, 2.0])),
    temperature=st.sampled_from([1.0, 0.5]),
    entropies=st.booleans(),
)
def test_the_kl_to_a_reference_with_other_rows_is_that_of_the_tokens_that_both_have(early, seed, tokens, **options):
    with pytest.MonkeyPatch.context() as patch:
        chunks_of(tokens, patch)
        check(case(seed, against=True, entropy_gradient=True, loss_gradient=early, **options))


KINDS = [Divergence("reverse_kl"), Divergence("forward_kl"), *(Divergence("jsd", beta) for beta in (0.1, 0.5, 0.9))]
TOP = [Divergence("forward_kl_topk"), Divergence("forward_kl_topk", least=-2.5)]


@pytest.mark.parametrize("early", [None, loss_gradient], ids=["recomputed", "early"])
@pytest.mark.parametrize("kind", [*KINDS, *TOP], ids=str)
@given(
    seed=st.integers(0, 1000),
    teacher_rows=st.sampled_from([VOCABULARY - 6, VOCABULARY, VOCABULARY + 4]),
    tokens=st.sampled_from([1, 4, 100]),
    bias=st.booleans(),
    against=st.booleans(),
    masked=st.sampled_from([(), MASKED]),
    rule=st.builds(LogitRule, st.sampled_from([1.0, 0.3]), st.sampled_from([None, 2.0])),
    temperature=st.sampled_from([1.0, 0.7]),
    entropies=st.booleans(),
    sum_pi_squared=st.booleans(),
)
def test_the_divergence_from_a_teacher_is_over_the_tokens_that_both_have(early, kind, seed, tokens, **options):
    if kind.kind.startswith("forward_kl"):
        options["masked"] = ()  # infinite: see below
    with pytest.MonkeyPatch.context() as patch:
        chunks_of(tokens, patch)
        check(case(seed, divergence=kind, entropy_gradient=True, loss_gradient=early, **options))


def test_what_samples_do_not_reach_is_that_of_every_eighth_token_of_a_chunk(monkeypatch):
    made = case(divergence=Divergence("forward_kl"))
    monkeypatch.setattr(heads, "UNREACHED", 0.03)
    exact = required(full(made).unreached)
    assert len({*exact.tolist()}) > 2
    nine = [0] * 8 + [8]
    torch.testing.assert_close(required(made.outputs().unreached).double(), exact[nine], atol=1e-6, rtol=1e-5)


P, Q = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]  # of three tokens


@pytest.mark.parametrize(
    ("kind", "value", "slopes"),
    [
        # ln 2 = 0.693147: 0.5 ln 2 - 0.25 ln 2; then p (log p - log q - D)
        (Divergence("reverse_kl"), 0.173287, [0.259930, -0.043322, -0.216608]),
        (Divergence("forward_kl"), 0.173287, [0.25, 0.0, -0.25]),  # 0.5 ln 2 - 0.25 ln 2; then p - q
        # m = 0.375, 0.25, 0.375: both KLs are 0.5 ln (4/3) + 0.25 ln (2/3) = 0.042475
        (Divergence("jsd", 0.5), 0.042475, [0.061302, -0.005309, -0.055992]),
        # m = 0.3, 0.25, 0.45: 0.25 ln (5/6) + 0.5 ln (10/9) = 0.0071, and 0.5 ln (5/3) + 0.25 ln (5/9) = 0.108466
        (Divergence("jsd", 0.8), 0.027373, [0.040236, -0.005423, -0.034813]),
    ],
    ids=str,
)
def test_a_divergence_worked_out_by_hand(kind, value, slopes):
    hidden, identity = torch.tensor(P).log()[None].requires_grad_(), torch.eye(3)
    teacher = ReferenceOutputs(torch.tensor(Q).log()[None], Head(identity))
    spec = OutputSpec(teacher=teacher, divergence=kind)
    divergence = required(token_outputs(hidden, Head(identity), torch.tensor([0]), spec).teacher_divergence)
    divergence.sum().backward()
    torch.testing.assert_close(divergence, torch.tensor([value]), atol=1e-6, rtol=0)
    torch.testing.assert_close(required(hidden.grad), torch.tensor([slopes]), atol=2e-6, rtol=0)


def test_the_divergence_over_the_most_probable_token_and_all_others_worked_out_by_hand():
    # 0.5 ln 2 + 0.5 ln (0.5 / 0.75); then p - q of the third token, and p (1 - 0.5 / 0.75) of the others
    hidden, identity = torch.tensor(P).log()[None].requires_grad_(), torch.eye(3)
    spec = OutputSpec(teacher=top_of(torch.tensor(Q).log()[None], 1), divergence=TOP[0])
    divergence = required(token_outputs(hidden, Head(identity), torch.tensor([0]), spec).teacher_divergence)
    divergence.sum().backward()
    torch.testing.assert_close(divergence, torch.tensor([0.143841]), atol=1e-6, rtol=0)
    torch.testing.assert_close(required(hidden.grad), torch.tensor([[1 / 6, 1 / 12, -0.25]]), atol=2e-6, rtol=0)


def test_the_divergence_over_most_probable_tokens_is_not_above_the_exact_one_and_0_at_the_teacher():
    exact, made = case(divergence=Divergence("forward_kl")), case(divergence=TOP[0])
    teacher = exact.spec.teacher
    assert isinstance(teacher, ReferenceOutputs)
    hidden, head = teacher
    spec, log_q = made.spec, (hidden @ head.weight.T * 0.7).log_softmax(-1)
    coarse = [
        required(made._replace(spec=spec._replace(teacher=top_of(log_q, k))).outputs().teacher_divergence)
        for k in (1, 3, VOCABULARY - 1)
    ]
    divergence = required(exact.outputs().teacher_divergence)
    assert all(
        (few >= 0).all() and (few <= more + 1e-5).all()
        for few, more in zip(coarse, [*coarse[1:], divergence], strict=True)
    )
    torch.testing.assert_close(coarse[-1], divergence)
    own = top_of((made.hidden @ made.head.weight.T).log_softmax(-1).detach(), 4)
    same = made._replace(spec=spec._replace(teacher=own)).outputs().teacher_divergence
    assert required(same).abs().max() <= 1e-6


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_teacher_that_is_the_policy_is_at_distance_0_and_gives_no_gradient(kind):
    made = case(divergence=kind, temperature=0.7)
    far = torch.autograd.grad(required(made.outputs().teacher_divergence).sum(), made.inputs)
    same = made._replace(spec=made.spec._replace(teacher=ReferenceOutputs(made.hidden.detach(), made.head)))
    divergence = required(same.outputs().teacher_divergence)
    assert divergence.abs().max() <= 1e-6
    near = torch.autograd.grad(divergence.sum(), made.inputs)
    assert all(a.norm() <= 1e-6 * b.norm() for a, b in zip(near, far, strict=True))


def test_a_forward_kl_is_infinite_where_the_policy_masks_a_token_and_its_gradient_is_finite():
    made = case(divergence=Divergence("forward_kl"), masked=(3,))
    divergence = required(made.outputs().teacher_divergence)
    assert divergence.eq(torch.inf).all()
    assert all(value.isfinite().all() for value in torch.autograd.grad(divergence.sum(), made.inputs))


@pytest.mark.parametrize("early", [None, loss_gradient], ids=["recomputed", "early"])
@pytest.mark.parametrize("tokens", [4, 100])
@pytest.mark.parametrize("other_rows", [VOCABULARY - 2, VOCABULARY])
@pytest.mark.parametrize("other_masked", [(), MASKED[:4]])
def test_a_masked_token_counts_as_one_of_probability_0(other_masked, other_rows, tokens, early, monkeypatch):
    chunks_of(tokens, monkeypatch)
    options = {"masked": MASKED, "loss_gradient": early, "entropies": True, "entropy_gradient": True}
    check(case(against=True, other_masked=other_masked, other_rows=other_rows, sum_pi_squared=True, **options))
    check(case(temperature=0.6, **options))


@pytest.mark.parametrize("logit", [torch.nan, torch.inf])
@pytest.mark.parametrize("of_reference", [False, True])
def test_logits_that_are_not_finite_are_not_taken_for_masked_ones(logit, of_reference):
    made = case(against=True, entropies=True, masked=MASKED, other_masked=MASKED)
    head = required(made.spec.against).head if of_reference else made.head
    required(head.bias).data[5] = logit
    outputs = made.outputs()
    assert required(outputs.reference_kl).isnan().all()
    assert of_reference or (required(outputs.entropies).isnan().all() and outputs.log_probs.isnan().all())


def test_a_masked_token_has_an_infinite_log_prob_and_finite_gradients_and_an_infinite_kl_if_it_may_be_sampled():
    made = case(masked=(3,))
    made.targets[4] = 3
    outputs = made.outputs()
    assert outputs.log_probs[4] == -torch.inf and outputs.log_probs.isfinite().sum() == TOKENS - 1
    weights = torch.ones(TOKENS).index_fill(0, torch.tensor(4), 0)  # as of a token that the policy did not write
    assert all(value.isfinite().all() for value in torch.autograd.grad(outputs.log_probs, made.inputs, weights))
    of_reference = case(against=True, other_masked=(2,)).outputs()
    assert required(of_reference.reference_kl).eq(torch.inf).all() and of_reference.log_probs.isfinite().all()


def test_logits_are_computed_once_with_an_early_gradient_and_otherwise_twice(monkeypatch):
    chunks_of(4, monkeypatch)
    assert products(case()) == [6, 3, 3]
    assert products(case(loss_gradient=loss_gradient)) == [3, 3, 3]


def test_logits_of_a_single_chunk_are_computed_once_for_any_loss():
    assert products(case()) == [1, 1, 1]


@pytest.mark.parametrize("early", [None, loss_gradient], ids=["recomputed", "early"])
@pytest.mark.parametrize("tokens", [0, 1, TOKENS])
def test_no_gradient_has_what_was_in_its_memory_before(early, tokens, monkeypatch):
    chunks_of(4, monkeypatch)
    made = case(
        bias=True, loss_gradient=early and (lambda outputs, _: TokenOutputs(torch.ones_like(outputs.log_probs)))
    )
    made = made._replace(hidden=made.hidden.detach()[:tokens].requires_grad_(), targets=made.targets[:tokens])
    right = made._replace(spec=OutputSpec())
    expected = gradients(right, lambda outputs: outputs.log_probs.sum())
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        actual = gradients(made, lambda outputs: outputs.log_probs.sum())
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(value.isfinite().all() for value in expected)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("factor", [-3.0, 0.0, 2.0**16])
def test_a_multiple_of_the_early_gradient_needs_no_more_logits(factor, monkeypatch):
    chunks_of(4, monkeypatch)
    right = gradients(case(), lambda outputs: factor * loss(outputs))
    made = case(loss_gradient=loss_gradient)
    assert products(made, lambda outputs: factor * loss(outputs)) == [3, 3, 3]
    torch.testing.assert_close(tuple(value.grad for value in made.inputs), right)


def test_an_early_gradient_of_zero_needs_no_more_logits(monkeypatch):
    chunks_of(4, monkeypatch)
    made = case(loss_gradient=lambda outputs, _: TokenOutputs(torch.zeros_like(outputs.log_probs)))
    assert products(made, lambda outputs: 0 * outputs.log_probs.sum()) == [3, 3, 3]
    assert not any(required(value.grad).any() for value in made.inputs)


@pytest.mark.parametrize("options", [{}, {"entropies": True, "entropy_gradient": True}, {"against": True}])
def test_a_gradient_that_differs_from_the_early_one_is_not_a_number_and_so_reaches_no_parameter(options, monkeypatch):
    chunks_of(4, monkeypatch)

    def other(outputs: TokenOutputs) -> Tensor:
        last = [value for value in outputs if value is not None][-1]
        return loss(outputs) + last.sum().square()

    made = case(loss_gradient=loss_gradient, **options)
    assert all(value.isnan().all() for value in gradients(made, other))


def test_a_gradient_that_is_not_finite_arrives(monkeypatch):
    chunks_of(4, monkeypatch)
    actual = gradients(case(loss_gradient=loss_gradient), lambda outputs: loss(outputs) * torch.nan)
    assert all(value.isnan().all() for value in actual)


def test_the_backward_pass_can_run_twice(monkeypatch):
    for tokens in (4, 100):
        chunks_of(tokens, monkeypatch)
        made = case(loss_gradient=loss_gradient)
        total = loss(made.outputs())
        once, twice = (torch.autograd.grad(total, made.inputs, retain_graph=True) for _ in range(2))
        torch.testing.assert_close(once, twice)


@pytest.mark.parametrize("early", [None, loss_gradient])
def test_a_frozen_head_has_no_gradient_and_costs_none(early, monkeypatch):
    chunks_of(4, monkeypatch)
    right = gradients(case())[0]
    made = case(loss_gradient=early)
    made.head.weight.requires_grad_(False)
    assert products(made)[1:] == [3, 0]
    torch.testing.assert_close(made.hidden.grad, right)
    assert made.head.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_logits_are_rounded_and_nothing_after_them(dtype, monkeypatch):
    chunks_of(4, monkeypatch)
    full = case()
    hidden, weight = (value.detach().to(dtype).requires_grad_() for value in (full.hidden, full.head.weight))
    made = Case(hidden, Head(weight), full.targets, OutputSpec(loss_gradient=loss_gradient))
    actual = made.outputs()
    logits = hidden @ weight.T
    right = logits.float().log_softmax(-1).gather(-1, full.targets[:, None]).squeeze(-1)
    torch.testing.assert_close(actual.log_probs, right)
    expected = torch.autograd.grad(loss(TokenOutputs(right)), made.inputs)
    torch.testing.assert_close(torch.autograd.grad(loss(actual), made.inputs), expected, atol=0.02, rtol=0.02)


def test_in_bfloat16_the_heads_gradient_of_ten_chunks_errs_by_less_than_half_a_percent(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 64, generator=generator).bfloat16() for size in (640, 300))
    weights, targets = torch.randn(640, generator=generator), torch.randint(300, (640,), generator=generator)

    def gradient_in(dtype: torch.dtype, tokens: int) -> Tensor:
        chunks_of(tokens, monkeypatch)
        head = Head((0.1 * weight).to(dtype).requires_grad_())
        outputs = Case(hidden.to(dtype), head, targets, OutputSpec()).outputs()
        (outputs.log_probs * weights).sum().backward()
        return required(head.weight.grad).float()

    right = gradient_in(torch.float32, 64)
    ten, one = (float((gradient_in(torch.bfloat16, tokens) - right).norm() / right.norm()) for tokens in (64, 640))
    assert one < ten < 0.005


def test_in_float16_the_early_gradient_is_not_used_as_it_would_vanish_unscaled(monkeypatch):
    chunks_of(4, monkeypatch)
    full, tiny = case(), 1e-9

    def half(early):
        hidden, weight = (value.detach().half().requires_grad_() for value in (full.hidden, full.head.weight))
        return Case(hidden, Head(weight), full.targets, OutputSpec(loss_gradient=early))

    made = half(lambda outputs, _: TokenOutputs(torch.full_like(outputs.log_probs, tiny)))
    actual = gradients(made, lambda outputs: 2.0**16 * tiny * outputs.log_probs.sum())
    torch.testing.assert_close(actual, gradients(half(None), lambda outputs: 2.0**16 * tiny * outputs.log_probs.sum()))
    assert actual[0].any()


def test_a_chunk_is_limited_in_bytes_but_has_enough_tokens_for_a_large_vocabulary():
    assert tokens_at_once("cpu", 2**14) == 48 * 2**20 // 2**16
    assert tokens_at_once("cpu", 2**20) == 256
    assert tokens_at_once("cuda", 2**17) == 2048

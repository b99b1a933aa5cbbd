import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.core.algorithms.objective import KLWeight, kl_estimate, penalized
from hybridrl.core.required import required

# One token with log-prob -1, reference -1.5: the difference d = -0.5. Values, and slopes in the log-prob.
VALUES = {"k1": 0.5, "abs": 0.5, "k2": 0.125, "k3": math.exp(-0.5) - 0.5}
SLOPES = {"k1": 1.0, "abs": 1.0, "k2": 0.5, "k3": 1 - math.exp(-0.5)}
SYNONYMS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def value_and_slope(form, log_prob=-1.0, reference=-1.5):
    log_probs = torch.tensor([log_prob], requires_grad=True)
    value = kl_estimate(log_probs, torch.tensor([reference]), form)
    value.sum().backward()
    return value.item(), required(log_probs.grad).item()


@pytest.mark.parametrize("form", VALUES)
def test_each_form_has_its_value_and_its_gradient(form):
    assert value_and_slope(form) == pytest.approx((VALUES[form], SLOPES[form]))


@pytest.mark.parametrize("form", VALUES)
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(form):
    assert value_and_slope(f"{form}+") == pytest.approx((VALUES[form], 0.5))


@pytest.mark.parametrize(("name", "form"), SYNONYMS.items())
def test_verls_names_mean_the_same_forms(name, form):
    assert value_and_slope(name) == value_and_slope(form)
    assert value_and_slope(f"{name}+") == value_and_slope(f"{form}+")


@pytest.mark.parametrize("form", ["k3", "k3+"])
def test_k3_is_at_most_ten_however_far_apart_the_two_are(form):
    assert value_and_slope(form, log_prob=-200.0, reference=-0.5)[0] == 10


PAIRS = st.lists(st.tuples(st.floats(-8, -0.01), st.floats(-8, -0.01)), min_size=1, max_size=10)


@pytest.mark.parametrize("form", VALUES)
@given(pairs=PAIRS)
def test_each_form_is_its_formula_token_by_token(form, pairs):
    log_probs, reference = torch.tensor(pairs, dtype=torch.float64).T
    expected = []
    for ours, theirs in pairs:
        value = math.exp(theirs - ours) - (theirs - ours) - 1
        formula = {"k1": ours - theirs, "abs": abs(ours - theirs), "k2": (ours - theirs) ** 2 / 2, "k3": min(value, 10)}
        expected.append(formula[form])
    assert kl_estimate(log_probs, reference, form).tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("form", VALUES)
def test_without_a_plus_the_gradient_is_the_finite_difference(form):
    generator = torch.Generator().manual_seed(0)
    log_probs, reference = -3 * torch.rand(2, 20, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda values: kl_estimate(values, reference, form), log_probs.requires_grad_())


@pytest.mark.parametrize("form", [*VALUES, "k3+"])
@given(pairs=PAIRS, shift=st.floats(-3, 3))
def test_only_the_difference_of_the_log_probs_counts(form, pairs, shift):
    log_probs, reference = torch.tensor(pairs, dtype=torch.float64).T
    shifted = kl_estimate(log_probs + shift, reference + shift, form)
    assert shifted.tolist() == pytest.approx(kl_estimate(log_probs, reference, form).tolist(), abs=1e-9)


@pytest.mark.parametrize("form", ["k1", "k3"])
def test_the_expectation_of_k1_and_k3_is_the_kl_divergence(form):
    log_p, log_q = torch.tensor([0.2, 0.3, 0.5]).log(), torch.tensor([0.4, 0.4, 0.2]).log()
    divergence = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="sum")
    assert (log_p.exp() * kl_estimate(log_p, log_q, form)).sum().item() == pytest.approx(divergence.item())


@pytest.mark.parametrize("form", ["k2", "k1+", "abs+", "k2+", "k3+"])
def test_the_expected_gradient_of_k2_is_the_gradient_of_the_kl_divergence(form):
    logits = torch.tensor([0.1, -0.4, 0.9], requires_grad=True)
    log_q = torch.tensor([0.4, 0.4, 0.2]).log()
    log_p = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), logits, retain_graph=True)
    sampled = (log_p.exp().detach() * kl_estimate(log_p, log_q, form)).sum()
    (estimated,) = torch.autograd.grad(sampled, logits)
    assert estimated.tolist() == pytest.approx(exact.tolist(), abs=1e-6)


def test_the_expected_gradient_of_k3_is_that_of_the_reverse_divergence():
    logits = torch.tensor([0.1, -0.4, 0.9], requires_grad=True)
    log_q = torch.tensor([0.4, 0.4, 0.2]).log()
    log_p = logits.log_softmax(0)
    (reverse,) = torch.autograd.grad((log_q.exp() * (log_q - log_p)).sum(), logits, retain_graph=True)
    (estimated,) = torch.autograd.grad((log_p.exp().detach() * kl_estimate(log_p, log_q, "k3")).sum(), logits)
    assert estimated.tolist() == pytest.approx(reverse.tolist(), abs=1e-6)


def test_where_k3_is_cut_a_token_is_pulled_back_by_the_gradient_of_k2_alone():
    # exp(d) - d - 1 reaches 10 at d = 2.6109, a ratio of 13.61, and at d = -11.
    for cut, whole in ((-1.0 - math.log(13.7), -1.0 - math.log(13.5)), (-1.0 + 11.01, -1.0 + 10.99)):
        assert value_and_slope("k3", cut, -1.0) == (10, 0)
        assert value_and_slope("k3", whole, -1.0)[1] == pytest.approx(1 - math.exp(-1.0 - whole), rel=1e-4)
        assert value_and_slope("k3+", cut, -1.0) == (10, pytest.approx(cut + 1.0, rel=1e-5))


def test_a_fixed_weight_stays():
    weight = KLWeight(0.1)
    weight.update(kl=5.0, samples=100)
    assert weight.value == 0.1


@pytest.mark.parametrize(("kl", "expected"), [(0.11, 0.101), (5.0, 0.102), (0.09, 0.099), (0.0, 0.098), (0.1, 0.1)])
def test_an_adaptive_weight_moves_towards_its_target_by_a_fifth_of_the_samples_share_at_most(kl, expected):
    # 10 samples of a horizon of 100: an error of 10% moves it by 1%, and no error by more than 2%.
    weight = KLWeight(0.1, target=0.1, horizon=100)
    weight.update(kl, samples=10)
    assert weight.value == pytest.approx(expected)


@pytest.fixture
def three_rows(make_batch):
    """Two written tokens of three, one, and none; k1 of the written ones is 0.5, -0.25 and 1."""
    return make_batch(
        [3, 1, 1],
        token_rewards=[0.0, 0.0, 1.0, 2.0, 3.0],
        old_log_probs=[-1.0, -9.0, -1.0, -2.0, -9.0],
        reference_log_probs=[-1.5, -1.0, -0.75, -3.0, -1.0],
        reference_kl=[0.1, 5.0, 0.3, 0.4, 5.0],
        response_mask=[True, False, True, True, False],
    )


def test_each_written_token_pays_for_its_own_kl(three_rows):
    rewards, _ = penalized(three_rows, "kl", 0.1)
    assert rewards.tolist() == pytest.approx([-0.05, 0, 1.025, 1.9, 3])


def test_the_kl_metric_is_the_mean_of_the_rows_means(three_rows):
    # (0.5 - 0.25) / 2, 1, and 0 of the row in which nothing was written.
    _, kl = penalized(three_rows, "kl", 0.1)
    assert kl == pytest.approx((0.125 + 1 + 0) / 3)


def test_the_full_kl_is_the_one_over_the_vocabulary_that_the_rows_bring(three_rows):
    rewards, kl = penalized(three_rows, "full", 0.1)
    assert rewards.tolist() == pytest.approx([-0.01, 0, 0.97, 1.96, 3])
    assert kl == pytest.approx((0.2 + 0.4 + 0) / 3)


def test_a_kl_that_is_not_finite_steers_nothing():
    weight = KLWeight(0.1, target=0.1, horizon=10)
    weight.update(float("nan"), samples=8)
    assert weight.value == 0.1

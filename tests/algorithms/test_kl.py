import math

import pytest
import torch

from hybridrl.algorithms.kl import KLWeight, kl_estimate

# One token with log-prob -1, reference -1.5: the difference d = -0.5. Values, and slopes in the log-prob.
VALUES = {"k1": 0.5, "abs": 0.5, "k2": 0.125, "k3": math.exp(-0.5) - 0.5}
SLOPES = {"k1": 1.0, "abs": 1.0, "k2": 0.5, "k3": 1 - math.exp(-0.5)}
SYNONYMS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def value_and_slope(form, log_prob=-1.0, reference=-1.5):
    log_probs = torch.tensor([log_prob], requires_grad=True)
    value = kl_estimate(log_probs, torch.tensor([reference]), form)
    value.sum().backward()
    return value.item(), log_probs.grad.item()


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


@pytest.mark.parametrize("form", ["k1", "k3"])
def test_the_expectation_of_k1_and_k3_is_the_kl_divergence(form):
    log_p, log_q = torch.tensor([0.2, 0.3, 0.5]).log(), torch.tensor([0.4, 0.4, 0.2]).log()
    divergence = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="sum")
    assert (log_p.exp() * kl_estimate(log_p, log_q, form)).sum().item() == pytest.approx(divergence.item())


def test_the_expected_gradient_of_k2_is_the_gradient_of_the_kl_divergence():
    logits = torch.tensor([0.1, -0.4, 0.9], requires_grad=True)
    log_q = torch.tensor([0.4, 0.4, 0.2]).log()
    log_p = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), logits, retain_graph=True)
    sampled = (log_p.exp().detach() * kl_estimate(log_p, log_q, "k3+")).sum()
    (estimated,) = torch.autograd.grad(sampled, logits)
    assert estimated.tolist() == pytest.approx(exact.tolist(), abs=1e-6)


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

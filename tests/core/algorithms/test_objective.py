"""The parts of an objective that policy losses share: the weights of tokens, KL penalties, the critic's loss."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.core.algorithms.objective import Divisors, KLWeight, kl_estimate, penalized, token_weights, value_loss
from hybridrl.required import required

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
SCALE = 4.0
ROWS = st.lists(st.lists(st.booleans(), min_size=1, max_size=5), min_size=1, max_size=8)


def masked(make_batch, rows):
    return make_batch([len(row) for row in rows], response_mask=[token for row in rows for token in row])


def reference(loss, rows, mode):
    """The loss as the papers write it, token by token: rows of (loss, written) -> one number."""
    values = iter(loss.tolist())
    written = [[value for value, mark in [(next(values), mark) for mark in row] if mark] for row in rows]
    written = [row for row in written if row]
    total = sum(map(sum, written))
    return {
        "token-mean": total / sum(map(len, written)),
        "seq-mean-token-sum": total / len(written),
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in written) / len(written),
        "token-sum": total,
        "seq-mean-token-sum-norm": total / len(written) / SCALE,
    }[mode]


@pytest.fixture
def three_rows(make_batch):
    """The policy wrote 2 of 3 tokens, the only one, and none of 2."""
    return masked(make_batch, [[True, False, True], [True], [False, False]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [1 / 3, 0, 1 / 3, 1 / 3, 0, 0]),
        ("seq-mean-token-sum", [1 / 2, 0, 1 / 2, 1 / 2, 0, 0]),
        ("seq-mean-token-mean", [1 / 4, 0, 1 / 4, 1 / 2, 0, 0]),
        ("token-sum", [1, 0, 1, 1, 0, 0]),
        ("seq-mean-token-sum-norm", [1 / 8, 0, 1 / 8, 1 / 8, 0, 0]),
    ],
)
def test_the_weight_of_each_token(three_rows, mode, expected):
    totals = Divisors.of(three_rows)
    assert totals == Divisors(tokens=3, rows=2), "written tokens, and rows that have one"
    assert token_weights(three_rows, mode, totals, SCALE).tolist() == pytest.approx(expected)


def test_the_divisor_is_that_of_the_totals_and_not_of_the_rows_at_hand(three_rows):
    weights = token_weights(three_rows.select([1]), "token-mean", Divisors(tokens=10, rows=5))
    assert weights.tolist() == pytest.approx([0.1])


@pytest.mark.parametrize("mode", MODES)
def test_where_nothing_was_written_every_weight_is_zero(make_batch, mode):
    batch = masked(make_batch, [[False, False], [False]])
    assert token_weights(batch, mode, Divisors.of(batch), SCALE).tolist() == [0, 0, 0]


@pytest.mark.parametrize("mode", MODES)
@given(rows=ROWS.filter(lambda rows: any(map(any, rows))))
def test_the_weighted_sum_is_the_papers_formula(make_batch, mode, rows):
    batch = masked(make_batch, rows)
    loss = torch.arange(1.0, len(batch.response_ids) + 1, dtype=torch.float64)
    weights = token_weights(batch, mode, Divisors.of(batch), SCALE)
    assert (loss * weights).sum().item() == pytest.approx(reference(loss, rows, mode), rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
@given(rows=ROWS, data=st.data())
def test_passes_add_up_to_the_whole_however_the_rows_are_cut(make_batch, mode, rows, data):
    batch = masked(make_batch, rows)
    totals, loss = Divisors.of(batch), torch.arange(1.0, len(batch.response_ids) + 1)
    batch.values = loss
    pass_of = data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    parts = [batch.select([row for row, number in enumerate(pass_of) if number == n]) for n in range(4)]
    whole = (loss * token_weights(batch, mode, totals, SCALE)).sum()
    sums = [(part.values * token_weights(part, mode, totals, SCALE)).sum() for part in parts if len(part)]
    assert torch.stack(sums).sum().item() == pytest.approx(whole.item(), rel=1e-5)


# -- KL ----------------------------------------------------------------------------------------------------------------

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
def paying_rows(make_batch):
    """Two written tokens of three, one, and none; k1 of the written ones is 0.5, -0.25 and 1."""
    return make_batch(
        [3, 1, 1],
        token_rewards=[0.0, 0.0, 1.0, 2.0, 3.0],
        old_log_probs=[-1.0, -9.0, -1.0, -2.0, -9.0],
        reference_log_probs=[-1.5, -1.0, -0.75, -3.0, -1.0],
        reference_kl=[0.1, 5.0, 0.3, 0.4, 5.0],
        response_mask=[True, False, True, True, False],
    )


def test_each_written_token_pays_for_its_own_kl_and_the_metric_is_the_mean_of_the_rows_means(paying_rows):
    rewards, kl = penalized(paying_rows, "kl", 0.1)
    assert rewards.tolist() == pytest.approx([-0.05, 0, 1.025, 1.9, 3])
    # (0.5 - 0.25) / 2, 1, and 0 of the row in which nothing was written.
    assert kl == pytest.approx((0.125 + 1 + 0) / 3)


def test_the_full_kl_is_the_one_over_the_vocabulary_that_the_rows_bring(paying_rows):
    rewards, kl = penalized(paying_rows, "full", 0.1)
    assert rewards.tolist() == pytest.approx([-0.01, 0, 0.97, 1.96, 3])
    assert kl == pytest.approx((0.2 + 0.4 + 0) / 3)


def test_a_kl_that_is_not_finite_steers_nothing():
    weight = KLWeight(0.1, target=0.1, horizon=10)
    weight.update(float("nan"), samples=8)
    assert weight.value == 0.1


# -- the critic --------------------------------------------------------------------------------------------------------

TOKENS = st.lists(st.tuples(*[st.floats(-3, 3)] * 3), min_size=1, max_size=12)


def run_value_loss(make_batch, cases, clip):
    """Loss, statistics and gradient of tokens with these (value, old value, return)."""
    values, old, returns = torch.tensor(cases, dtype=torch.float64).T
    values = values.clone().requires_grad_()
    loss, statistics = value_loss(values, make_batch([len(cases)], values=old, returns=returns), clip)
    loss.sum().backward()
    return loss.tolist(), {name: value.tolist() for name, value in statistics.items()}, required(values.grad).tolist()


def test_a_value_that_went_too_far_towards_its_target_has_no_gradient(make_batch):
    # Towards the target: too far, not yet too far. Away from it: too far. Beyond it: counted from the window's edge.
    cases = [(0.5, 0.0, 1.0), (0.1, 0.0, 1.0), (-0.5, 0.0, 1.0), (1.5, 0.0, 0.3)]
    loss, statistics, gradient = run_value_loss(make_batch, cases, clip=0.2)
    assert loss == pytest.approx([0.5 * 0.8**2, 0.5 * 0.9**2, 0.5 * 1.5**2, 0.5 * 1.2**2])
    assert gradient == pytest.approx([0, -0.9, -1.5, 1.2])
    assert statistics == {"vf_clipfrac": [1, 0, 0, 0], "vpred_mean": [0.5, 0.1, -0.5, 1.5]}


@given(TOKENS, st.floats(0.01, 2))
def test_value_and_gradient_are_those_of_the_formula(make_batch, cases, clip):
    expected = []
    for value, old, target in cases:
        near = min(max(value, old - clip), old + clip)
        bound = (near - target) ** 2 > (value - target) ** 2
        expected.append((0.5 * (near - target) ** 2, 0.0) if bound else (0.5 * (value - target) ** 2, value - target))
    loss, _, gradient = run_value_loss(make_batch, cases, clip)
    assert loss == pytest.approx([value for value, _ in expected], abs=1e-9)
    assert gradient == pytest.approx([slope for _, slope in expected], abs=1e-9)


def test_statistics_carry_no_gradient(make_batch):
    values = torch.zeros(1, requires_grad=True)
    _, statistics = value_loss(values, make_batch([1], values=[0.0], returns=[1.0]), 0.5)
    assert not any(value.requires_grad for value in statistics.values())

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.core.algorithms.objective import value_loss
from hybridrl.core.required import required

TOKENS = st.lists(st.tuples(*[st.floats(-3, 3)] * 3), min_size=1, max_size=12)


def run(make_batch, cases, clip):
    """Loss, statistics and gradient of tokens with these (value, old value, return)."""
    values, old, returns = torch.tensor(cases, dtype=torch.float64).T
    values = values.clone().requires_grad_()
    loss, statistics = value_loss(values, make_batch([len(cases)], values=old, returns=returns), clip)
    loss.sum().backward()
    return loss.tolist(), {name: value.tolist() for name, value in statistics.items()}, required(values.grad).tolist()


def test_a_value_that_went_too_far_towards_its_target_has_no_gradient(make_batch):
    # Towards the target: too far, not yet too far. Away from it: too far. Beyond it: counted from the window's edge.
    cases = [(0.5, 0.0, 1.0), (0.1, 0.0, 1.0), (-0.5, 0.0, 1.0), (1.5, 0.0, 0.3)]
    loss, statistics, gradient = run(make_batch, cases, clip=0.2)
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
    loss, _, gradient = run(make_batch, cases, clip)
    assert loss == pytest.approx([value for value, _ in expected], abs=1e-9)
    assert gradient == pytest.approx([slope for _, slope in expected], abs=1e-9)


@given(TOKENS)
def test_in_a_wide_window_it_is_half_the_squared_error(make_batch, cases):
    loss, statistics, _ = run(make_batch, cases, clip=100)
    assert loss == pytest.approx([0.5 * (value - target) ** 2 for value, _, target in cases])
    assert not any(statistics["vf_clipfrac"])


@given(TOKENS, st.floats(-5, 5))
def test_only_differences_between_values_count(make_batch, cases, shift):
    loss, _, _ = run(make_batch, cases, clip=0.5)
    shifted, _, _ = run(make_batch, [tuple(number + shift for number in case) for case in cases], clip=0.5)
    assert shifted == pytest.approx(loss, abs=1e-9)


def test_the_gradient_is_the_finite_difference(make_batch):
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 40, generator=generator, dtype=torch.float64)
    batch = make_batch([40], values=old, returns=returns)
    assert torch.autograd.gradcheck(lambda guess: value_loss(guess, batch, 0.5)[0], values.clone().requires_grad_())


def test_statistics_carry_no_gradient(make_batch):
    values = torch.zeros(1, requires_grad=True)
    _, statistics = value_loss(values, make_batch([1], values=[0.0], returns=[1.0]), 0.5)
    assert not any(value.requires_grad for value in statistics.values())

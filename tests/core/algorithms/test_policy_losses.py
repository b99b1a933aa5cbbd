"""Every policy loss: numbers by hand, its formula token by token, and what holds of all, with the exceptions named."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridrl.config.catalog import POLICY_LOSSES
from hybridrl.core.algorithms.objective import Divisors, token_weights
from hybridrl.core.algorithms.policy_losses import covariance, select_clipped, select_penalized
from hybridrl.core.batch import Batch
from hybridrl.required import required
from tests.core.algorithms.parameters import policy_loss

SEEDS = st.integers(0, 10_000)
few = settings(max_examples=15)  # of rows that are many cases each
Ragged = Callable[..., tuple[Tensor, Batch]]


@pytest.fixture(scope="session")
def ragged(make_batch) -> Ragged:
    """Log-probs and rows of 1 to 5 tokens drawn from a seed; some tokens are not written, and one row has none."""

    def draw(seed: int, *, one_advantage_a_row: bool = False) -> tuple[Tensor, Batch]:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 6, (6,), generator=generator)
        rows = torch.repeat_interleave(torch.arange(6), lengths)
        tokens = len(rows)
        written = (torch.rand(tokens, generator=generator) < 0.8) & (rows != 2)
        written[0] = True
        old = -3 * torch.rand(tokens, generator=generator, dtype=torch.float64)
        moved = old + 0.4 * torch.randn(tokens, generator=generator, dtype=torch.float64)
        # Rounded, so that some are 0.
        advantages = torch.randn(tokens, generator=generator, dtype=torch.float64).round(decimals=1)
        advantages = advantages[lengths.cumsum(0) - lengths][rows] if one_advantage_a_row else advantages
        chosen = written & (torch.rand(tokens, generator=generator) < 0.3)
        fields = {"response_mask": written, "old_log_probs": old, "advantages": advantages, "chosen": chosen}
        return moved.clamp(max=-0.01), make_batch(lengths.tolist(), **fields)

    return draw


def total(
    name: str, log_probs: Tensor, batch: Batch, values: dict[str, float], totals: Divisors | None = None
) -> Tensor:
    """Return a mini-batch's loss, or a micro-batch's share of it, averaged as the loss of this name is, else over
    tokens."""
    loss, _ = policy_loss(name, **values)(log_probs, batch)
    mode = POLICY_LOSSES[name].aggregation or "token-mean"
    return (loss * token_weights(batch, mode, totals or Divisors.of(batch))).sum()


# -- numbers by hand ---------------------------------------------------------------------------------------------------

WINDOW = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}
LOGARITHMS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.4}
NARROW = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 3.0}
COVARIANCE = WINDOW | {"ppo_kl_coef": 0.5}
LN2 = math.log(2)


def ratios(*tokens: tuple[float, float]) -> list[tuple[float, float, float]]:
    """Tokens of these (ratio, advantage)."""
    return [(0.1, 0.1 * ratio, advantage) for ratio, advantage in tokens]


def changes(*tokens: tuple[float, float]) -> list[tuple[float, float, float]]:
    """Tokens whose log-probs moved by these, and their advantages."""
    return ratios(*((math.exp(change), advantage) for change, advantage in tokens))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# Loss, parameters, one row of tokens (probability before, now, advantage) and its other fields; the expected loss per
# token, its gradient and statistics.
BY_HAND: dict[str, tuple[str, dict[str, float], list[tuple[float, float, float]], dict[str, Any], dict[str, list]]] = {
    # Gained enough above; fell, to be raised; fell enough; rose, to be lowered; within the window.
    "vanilla: clipped on the side where it would gain": (
        "vanilla", WINDOW, ratios((1.5, 1), (0.5, 1), (0.5, -1), (1.5, -1), (1.1, 2)), {},
        {"loss": [-1.3, -0.5, 0.8, 1.5, -2.2], "gradient": [0, -0.5, 0, 1.5, -2.2], "pg_clipfrac": [1, 0, 1, 0, 0]},
    ),
    "vanilla: the dual clip bounds a bad token that became likely": (
        "vanilla", WINDOW | {"clip_ratio_c": 3.0}, ratios((5, -1), (2.9, -1), (5, 1), (5, -0.5)), {},
        {"loss": [3, 2.9, -1.3, 1.5], "gradient": [0, 2.9, 0, 0], "pg_clipfrac_lower": [1, 0, 0, 1]},
    ),
    # Ratios 2 and 0.6: their geometric mean is the root of 1.2, within the window, though neither token's is.
    "gspo: one ratio per row": (
        "gspo", WINDOW, [(0.2, 0.4, 1.0), (0.5, 0.3, 1.0)], {},
        {"loss": [-math.sqrt(1.2)] * 2, "gradient": [-math.sqrt(1.2)] * 2, "pg_clipfrac": [0, 0],
         "ppo_kl": [-LN2, -math.log(0.6)]},
    ),
    "gspo: a row beyond the window is clipped whole": (
        "gspo", WINDOW, [(0.2, 0.4, 1.0), (0.5, 0.5, 1.0)], {},
        {"loss": [-1.3] * 2, "gradient": [0, 0], "pg_clipfrac": [1, 1]},
    ),
    "gspo: the ratio of written tokens": (
        "gspo", WINDOW, [(0.2, 0.4, -1.0), (0.5, 0.01, -1.0)], {"response_mask": [True, False]}, {"loss": [2.0, 2.0]},
    ),
    "gspo: its logarithm is at most ten": (
        "gspo", WINDOW, [(1e-6, 0.9, -1.0)], {}, {"loss": [math.exp(10)], "gradient": [0]},
    ),
    # (0.4 - 0.6) / 2 = -0.1. Of two tokens that carry the row's loss, the clipped one has no gradient.
    "geo_mean: a good row is clipped above": (
        "geo_mean", LOGARITHMS, changes((0.5, 1), (-0.6, 1)), {},
        {"loss": [-math.exp(-0.1)] * 2, "gradient": [0, -math.exp(-0.1)], "pg_clipfrac": [1, 1],
         "pg_clipfrac_lower": [0, 0], "ppo_kl": [-0.5, 0.6]},
    ),
    # (0.6 - 0.2) / 2 = 0.2.
    "geo_mean: a bad row is clipped below": (
        "geo_mean", LOGARITHMS, changes((0.6, -2), (-0.3, -2)), {},
        {"loss": [2 * math.exp(0.2)] * 2, "gradient": [2 * math.exp(0.2), 0], "pg_clipfrac": [0, 0],
         "pg_clipfrac_lower": [1, 1]},
    ),
    "geo_mean: the mean of written tokens": (
        "geo_mean", LOGARITHMS, changes((0.3, 1), (0.1, 3), (0.2, 3)), {"response_mask": [True, False, True]},
        {"loss": [-2 * math.exp(0.25)] * 3, "gradient": [-3 * math.exp(0.25), 0, -3 * math.exp(0.25)]},
    ),
    "geo_mean: a token without an advantage does not change the ratio": (
        "geo_mean", LOGARITHMS, changes((0.3, 1), (0.1, 0)), {},
        {"loss": [-0.5 * math.exp(0.15)] * 2, "gradient": [-0.5 * math.exp(0.15), 0]},
    ),
    "cispo: every token keeps a gradient": (
        "cispo", WINDOW, [(0.2, 0.3, 1.0), (0.2, 0.1, 1.0), (0.2, 0.1, -1.0), (0.2, 0.22, 2.0)], {},
        {"loss": [-1.3 * math.log(0.3), -0.8 * math.log(0.1), 0.8 * math.log(0.1), -2.2 * math.log(0.22)],
         "gradient": [-1.3, -0.8, 0.8, -2.2], "pg_clipfrac": [1, 1, 1, 0]},
    ),
    # Slope 4 g (1 - g) r: a bad token that became likely is left sooner. At a ratio of 1 the loss is 2 A / tau.
    "sapo: each sign has its temperature": (
        "sapo", {"tau_pos": 1.0, "tau_neg": 2.0}, ratios((2, 1), (2, -1), (1, 1), (1, -1)), {},
        {"loss": [-4 * sigmoid(1), 2 * sigmoid(2), -2, 1],
         "gradient": [-8 * sigmoid(1) * sigmoid(-1), 8 * sigmoid(2) * sigmoid(-2), -1, 1]},
    ),
    "gpg: however far the policy moved": (
        "gpg", {}, [(0.2, 0.4, 2.0), (0.9, 0.1, -0.5)], {},
        {"loss": [-2 * math.log(0.4), 0.5 * math.log(0.1)], "gradient": [-2, 0.5]},
    ),
    "reinforce: the same": (
        "reinforce", {}, [(0.2, 0.4, 2.0), (0.9, 0.1, -0.5)], {},
        {"loss": [-2 * math.log(0.4), 0.5 * math.log(0.1)], "gradient": [-2, 0.5]},
    ),
    # Log-ratios ln 2 and -ln 2; slopes -A + weight * log-ratio.
    "dro: half the square of what moved": (
        "dro", {"dro_beta": 0.5}, [(0.2, 0.4, 2.0), (0.4, 0.2, -1.0)], {},
        {"loss": [-2 * math.log(0.4) + 0.25 * LN2**2, math.log(0.2) + 0.25 * LN2**2],
         "gradient": [-2 + 0.5 * LN2, 1 - 0.5 * LN2], "ppo_kl": [-LN2, LN2]},
    ),
    # To be raised: far, near, far the wrong way. To be lowered: the same.
    "dppo_tv: masks what moved too far along its advantage": (
        "dppo_tv", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15},
        [(0.5, 0.7, 1.0), (0.5, 0.6, 1.0), (0.5, 0.3, 1.0), (0.5, 0.3, -1.0), (0.5, 0.45, -1.0), (0.5, 0.7, -1.0)], {},
        {"gradient": [0, -1.2, -0.6, 0, 0.9, 1.4], "pg_clipfrac": [1, 0, 0, 1, 0, 0]},
    ),
    # The last one is masked, and so not counted as bounded too.
    "dppo_tv: an unlikely token may grow, but its weight is bounded": (
        "dppo_tv", NARROW, [(0.001, 0.01, 1.0), (0.001, 0.002, 1.0), (0.1, 0.5, 1.0)], {},
        {"gradient": [-3, -2, 0], "pg_clipfrac": [0, 0, 1], "pg_clipfrac_lower": [1, 0, 0]},
    ),
    "dppo_kl: the same": (
        "dppo_kl", NARROW, [(0.001, 0.01, 1.0), (0.001, 0.002, 1.0)], {},
        {"gradient": [-3, -2], "pg_clipfrac": [0, 0], "pg_clipfrac_lower": [1, 0]},
    ),
    # 0.5 ln(0.5 / 0.7) + 0.5 ln(0.5 / 0.3) = 0.0872, and the same mirrored.
    "dppo_kl: the divergence is that against all other tokens": (
        "dppo_kl", {"clip_ratio_low": 0.087, "clip_ratio_high": 0.088}, [(0.5, 0.7, 1.0), (0.5, 0.3, -1.0)], {},
        {"pg_clipfrac": [0, 1]},
    ),
    "dppo_kl: in the other direction": (
        "dppo_kl", {"clip_ratio_low": 0.088, "clip_ratio_high": 0.087}, [(0.5, 0.7, 1.0), (0.5, 0.3, -1.0)], {},
        {"pg_clipfrac": [1, 0]},
    ),
    "dppo_tv: each direction has its threshold": (
        "dppo_tv", {"clip_ratio_low": 0.01, "clip_ratio_high": 0.5}, [(0.5, 0.7, 1.0), (0.5, 0.3, -1.0)], {},
        {"pg_clipfrac": [0, 1]},
    ),
    "dppo_kl: what moved against its advantage is never masked": (
        "dppo_kl", {"clip_ratio_low": 0.0, "clip_ratio_high": 0.0}, [(0.5, 0.1, 1.0), (0.5, 0.9, -1.0)], {},
        {"pg_clipfrac": [0, 0]},
    ),
    "clip_cov: no gradient for the selected, a window for the others": (
        "clip_cov", COVARIANCE, [(0.2, 0.22, 1.0), (0.2, 0.22, 1.0), (0.2, 0.3, 1.0), (0.02, 0.2, -1.0)],
        {"chosen": [True, False, False, False]},
        {"loss": [0, -1.1, -1.3, 10], "gradient": [0, -1.1, 0, 10], "pg_clipfrac": [1, 0, 0, 0]},
    ),
    "kl_cov: the selected pay for moving either way, and nothing is clipped": (
        "kl_cov", COVARIANCE, [(0.2, 0.3, 1.0), (0.2, 0.3, 1.0), (0.2, 0.1, 1.0)], {"chosen": [False, True, True]},
        {"loss": [-1.5, -1.5 + 0.5 * math.log(1.5), -0.5 + 0.5 * LN2], "gradient": [-1.5, -1.0, -1.0],
         "ppo_kl": [math.log(1.5), math.log(1.5), LN2]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_HAND)
def test_numbers_by_hand(make_batch, case):
    name, parameters, tokens, fields, expected = BY_HAND[case]
    before, now, advantages = torch.tensor(tokens).T
    batch = replace(make_batch([len(tokens)], **fields), old_log_probs=before.log(), advantages=advantages)
    log_probs = now.log().requires_grad_()
    loss, statistics = policy_loss(name, **parameters)(log_probs, batch)
    loss.sum().backward()
    found = {"loss": loss, "gradient": required(log_probs.grad)} | statistics
    for kind, values in expected.items():
        assert found[kind].tolist() == pytest.approx(values), kind


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [("gpg", {"advantages": [2.0, 1.0]}, [1.0, 2.0]), ("likelihood", {}, [0.5, 2.0])],
)
def test_the_log_likelihood_needs_no_old_log_probs_and_its_negative_no_advantages(make_batch, name, fields, expected):
    loss, statistics = policy_loss(name)(torch.tensor([-0.5, -2.0]), make_batch([2], **fields))
    assert (loss.tolist(), statistics) == (expected, {})


def test_a_probability_that_rounding_lifts_above_one_still_has_a_divergence(make_batch):
    # A token that was sure and stays so has not moved, whichever side of 1 it is rounded to.
    batch = make_batch([1], old_log_probs=[0.0], advantages=[1.0])
    loss, statistics = policy_loss("dppo_kl", clip_ratio_high=0.01)(torch.tensor([2e-7]), batch)
    assert statistics["pg_clipfrac"].tolist() == [0] and torch.isfinite(loss).all()


# -- formulas ----------------------------------------------------------------------------------------------------------

FORMULA = dict(
    clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=1.5, tau_pos=1.0, tau_neg=1.4, ppo_kl_coef=0.7, dro_beta=0.3
)
THRESHOLDS = dict(clip_ratio_low=0.04, clip_ratio_high=0.07, clip_ratio_c=1.5)
LOW, HIGH, DUAL = 0.2, 0.3, 1.5


@dataclass
class Token:
    new: float
    old: float
    advantage: float
    chosen: bool

    @property
    def ratio(self) -> float:
        return math.exp(self.new - self.old)


# Each takes the written tokens of one row and gives (loss, its slope in the token's own log-prob) of each.


def surrogate(ratio, advantage):
    """min(r A, clip(r) A), negative, and its slope in log r."""
    clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
    if ratio * advantage <= clipped * advantage:
        return -ratio * advantage, -ratio * advantage
    return -clipped * advantage, 0.0


def vanilla(row):
    for token in row:
        loss, slope = surrogate(token.ratio, token.advantage)
        if token.advantage < 0 and loss > -DUAL * token.advantage:
            loss, slope = -DUAL * token.advantage, 0.0
        yield loss, slope


def gspo(row):
    ratio = math.exp(sum(token.new - token.old for token in row) / len(row))
    for token in row:
        yield surrogate(ratio, token.advantage)


def cispo(row):
    for token in row:
        weight = min(max(token.ratio, 1 - LOW), 1 + HIGH)
        yield -token.advantage * weight * token.new, -token.advantage * weight


def sapo(row):
    for token in row:
        tau = 1.0 if token.advantage > 0 else 1.4
        gate = 1 / (1 + math.exp(-tau * (token.ratio - 1)))
        yield -token.advantage * 4 / tau * gate, -token.advantage * 4 * gate * (1 - gate) * token.ratio


def geo_mean(row):
    changes, free = [], []
    for token in row:
        change = token.new - token.old
        limit = min(change, HIGH) if token.advantage > 0 else max(change, -LOW) if token.advantage < 0 else 0.0
        changes.append(limit)
        free.append(limit == change)
    advantage = sum(token.advantage for token in row) / len(row)
    loss = -advantage * math.exp(sum(changes) / len(row))
    # The loss stands at each of n tokens, and each token's log-prob moves it by 1 / n.
    for inside in free:
        yield loss, loss * inside


def reinforce(row):
    for token in row:
        yield -token.advantage * token.new, -token.advantage


def clip_cov(row):
    for token in row:
        yield (0.0, 0.0) if token.chosen else surrogate(token.ratio, token.advantage)


def kl_cov(row):
    for token in row:
        change = token.new - token.old
        penalty = (0.7 * abs(change), 0.7 * math.copysign(1, change)) if token.chosen else (0.0, 0.0)
        yield -token.advantage * token.ratio + penalty[0], -token.advantage * token.ratio + penalty[1]


def masked(row, divergence):
    for token in row:
        rose, far = token.new > token.old, divergence(math.exp(token.new), math.exp(token.old))
        beyond = rose and far > 0.07 if token.advantage > 0 else not rose and far > 0.04
        weight = 0.0 if beyond else min(token.ratio, DUAL)
        yield -token.advantage * weight * token.new, -token.advantage * weight


def dppo_tv(row):
    return masked(row, lambda new, old: abs(new - old))


def dppo_kl(row):
    return masked(row, lambda new, old: old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new)))


def dro(row):
    for token in row:
        change = token.new - token.old
        yield -token.advantage * token.new + 0.5 * 0.3 * change**2, -token.advantage + 0.3 * change


def likelihood(row):
    for token in row:
        yield -token.new, -1.0


BY_NAME = (vanilla, gspo, cispo, sapo, geo_mean, clip_cov, kl_cov, dppo_tv, dppo_kl, dro, reinforce, likelihood)
REFERENCES = {of.__name__: of for of in BY_NAME} | {"gmpo": geo_mean, "gpg": reinforce}


def rows_of(log_probs, batch):
    """The written tokens of each row that has any."""
    rows = [[] for _ in range(len(batch))]
    fields = (batch.response_row, batch.response_mask, log_probs, batch.old_log_probs, batch.advantages, batch.chosen)
    for row, written, *token in zip(*(field.tolist() for field in fields), strict=True):
        rows[row] += [Token(*token)] if written else []
    return [row for row in rows if row]


@pytest.mark.parametrize("name", POLICY_LOSSES)
@given(seed=SEEDS)
def test_value_and_gradient_are_those_of_the_formula_on_ragged_rows(ragged, name, seed):
    log_probs, batch = ragged(seed)
    rows = rows_of(log_probs, batch)
    log_probs.requires_grad_()
    loss = total(name, log_probs, batch, THRESHOLDS if name.startswith("dppo") else FORMULA)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    tokens = sum(map(len, rows))
    by_row = POLICY_LOSSES[name].aggregation == "seq-mean-token-mean"
    weighted = [
        (value / (len(row) * len(rows) if by_row else tokens), slope / (len(row) * len(rows) if by_row else tokens))
        for row in rows
        for value, slope in REFERENCES[name](row)
    ]
    assert loss.item() == pytest.approx(sum(value for value, _ in weighted), abs=1e-6)
    assert gradient[batch.response_mask].tolist() == pytest.approx([slope for _, slope in weighted], abs=1e-6)
    assert not gradient[~batch.response_mask].any()


# -- properties --------------------------------------------------------------------------------------------------------

SETTINGS = dict(clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=1.5)
NAMES = [name for name in POLICY_LOSSES if name != "gmpo"]
LEARNING_FROM_REWARDS = [name for name in NAMES if name != "likelihood"]


def gradient_of(name, log_probs, batch, totals=None):
    log_probs = log_probs.clone().requires_grad_()
    loss = total(name, log_probs, batch, SETTINGS, totals)
    return loss.item(), torch.autograd.grad(loss, log_probs)[0]


@pytest.mark.parametrize("name", LEARNING_FROM_REWARDS)
@few
@given(seed=SEEDS)
def test_before_the_first_update_the_gradient_is_the_policy_gradient(ragged, name, seed):
    _, batch = ragged(seed, one_advantage_a_row=True)
    _, gradient = gradient_of(name, batch.old_log_probs, batch)
    expected = -batch.advantages * token_weights(
        batch, POLICY_LOSSES[name].aggregation or "token-mean", Divisors.of(batch)
    )
    if name == "clip_cov":  # of all losses the only one that leaves tokens out from the start
        expected = expected * ~batch.chosen
    assert gradient.tolist() == pytest.approx(expected.tolist(), abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
@few
@given(seed=SEEDS, order=st.permutations(range(6)), cut=st.integers(1, 5))
def test_passes_of_rows_in_any_order_add_up_to_the_mini_batch(ragged, name, seed, order, cut):
    log_probs, batch = ragged(seed)
    whole, gradient = gradient_of(name, log_probs, batch)
    carried = replace(batch, values=log_probs, returns=gradient)
    parts = [carried.select(order[:cut]), carried.select(order[cut:])]
    shares = [gradient_of(name, part.values, part, Divisors.of(batch)) for part in parts]
    assert sum(loss for loss, _ in shares) == pytest.approx(whole)
    for part, (_, found) in zip(parts, shares, strict=True):
        assert found.tolist() == pytest.approx(part.returns.tolist())


@pytest.mark.parametrize("name", NAMES)
def test_statistics_are_one_a_token_and_carry_no_gradient(ragged, name):
    log_probs, batch = ragged(0)
    log_probs.requires_grad_()
    loss, statistics = policy_loss(name, **SETTINGS)(log_probs, batch)
    assert loss.requires_grad and loss.shape == log_probs.shape
    assert set(statistics) <= {"pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"}
    for value in statistics.values():
        assert value.shape == log_probs.shape and value.is_floating_point() and not value.requires_grad


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("gpg", "likelihood", "kl_cov")])
def test_ppo_kl_is_the_fall_of_the_log_prob(ragged, name):
    log_probs, batch = ragged(0)
    _, statistics = policy_loss(name, **SETTINGS)(log_probs, batch)
    assert statistics["ppo_kl"].tolist() == pytest.approx((batch.old_log_probs - log_probs).tolist())


@pytest.mark.parametrize("name", ["vanilla", "cispo", "sapo", "dppo_tv", "dppo_kl"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("change", [-1000.0, 1000.0])
def test_the_log_ratio_is_at_most_twenty_either_way(make_batch, name, change, advantage):
    batch = make_batch([1], old_log_probs=[0.0], advantages=[advantage])
    log_probs = torch.tensor([change], requires_grad=True)
    loss, statistics = policy_loss(name, **SETTINGS)(log_probs, batch)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(log_probs.grad).all()
    assert statistics["ppo_kl"].item() == -math.copysign(20, change)


def gradient_of_the_first(ragged, name, seed, move_others):
    log_probs, batch = ragged(seed)
    log_probs[1:] -= move_others
    return gradient_of(name, log_probs, batch)[1][0]


@pytest.mark.parametrize("name", [name for name in NAMES if POLICY_LOSSES[name].by_token])
@few
@given(seed=SEEDS, move=st.floats(0, 5))
def test_by_token_the_gradient_depends_on_no_other_tokens_log_prob(ragged, name, seed, move):
    alone, with_others = (gradient_of_the_first(ragged, name, seed, by) for by in (0, move))
    assert torch.equal(alone, with_others)


@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES if not POLICY_LOSSES[name].by_token])
def test_in_other_losses_it_does(ragged, name):
    moved = [gradient_of_the_first(ragged, name, seed, 0.05) for seed in range(20)]
    assert moved != [gradient_of_the_first(ragged, name, seed, 0) for seed in range(20)]


# -- selection by covariance -------------------------------------------------------------------------------------------


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def six_tokens(make_batch):
    """Over the four written tokens the advantages' mean is 0, the log-probs' -2; their covariances are 2, 1, 4, 3."""
    return make_batch(
        [3, 3],
        advantages=[2.0, -1.0, 50.0, -4.0, 50.0, 3.0],
        old_log_probs=[-1.0, -3.0, -0.1, -3.0, -0.1, -1.0],
        response_mask=[True, True, False, True, False, True],
    )


def test_the_covariance_is_around_the_means_of_written_tokens(six_tokens):
    assert covariance(six_tokens).tolist() == pytest.approx([2, 1, -math.inf, 4, -math.inf, 3])


@given(seed=SEEDS)
def test_the_covariances_are_those_of_the_formula_on_ragged_rows(ragged, seed):
    _, batch = ragged(seed)
    fields = (batch.advantages, batch.old_log_probs, batch.response_mask)
    written = [values[:2] for values in zip(*(field.tolist() for field in fields), strict=True) if values[2]]
    means = [sum(values) / len(written) for values in zip(*written, strict=True)]
    expected = [(advantage - means[0]) * (log_prob - means[1]) for advantage, log_prob in written]
    assert covariance(batch)[batch.response_mask].tolist() == pytest.approx(expected, abs=1e-9)


def test_clip_cov_draws_its_share_from_the_tokens_strictly_between_the_bounds(six_tokens):
    settings = dict(clip_cov_ratio=1.0, clip_cov_lb=1.0, clip_cov_ub=4.0)
    assert policy_loss(select_clipped, **settings)(six_tokens, seeded()).nonzero().flatten().tolist() == [0, 5]


def test_clip_cov_draws_no_more_than_its_share_and_any_candidate_may_be_drawn(six_tokens):
    settings = dict(clip_cov_ratio=0.5, clip_cov_lb=0.0, clip_cov_ub=4.5)
    draws = [policy_loss(select_clipped, **settings)(six_tokens, seeded(seed)) for seed in range(30)]
    assert {int(draw.sum()) for draw in draws} == {2}
    assert torch.stack(draws).any(0).tolist() == six_tokens.response_mask.tolist()


def test_the_same_generator_draws_the_same(six_tokens):
    settings = dict(clip_cov_ratio=0.3, clip_cov_lb=0.0)
    assert torch.equal(*(policy_loss(select_clipped, **settings)(six_tokens, seeded(7)) for _ in range(2)))


def test_without_a_candidate_clip_cov_chooses_none(six_tokens):
    settings = dict(clip_cov_ratio=0.5, clip_cov_lb=5.0, clip_cov_ub=9.0)
    assert not policy_loss(select_clipped, **settings)(six_tokens, seeded()).any()


@pytest.mark.parametrize(("share", "chosen"), [(0.5, [3, 5]), (0.74, [3, 5]), (0.75, [0, 3, 5]), (1.0, [0, 1, 3, 5])])
def test_kl_cov_takes_the_share_with_the_highest_covariance(six_tokens, share, chosen):
    settings = dict(kl_cov_ratio=share)
    assert policy_loss(select_penalized, **settings)(six_tokens, seeded()).nonzero().squeeze(1).tolist() == chosen


@pytest.mark.parametrize("selector", [select_clipped, select_penalized])
def test_of_a_share_below_one_token_one_is_chosen_and_none_where_nothing_was_written(six_tokens, selector):
    assert policy_loss(selector)(six_tokens, seeded()).sum() == 1
    unwritten = replace(six_tokens, response_mask=torch.zeros(6, dtype=torch.bool))
    assert policy_loss(selector)(unwritten, seeded()).tolist() == [False] * 6

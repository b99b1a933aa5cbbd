"""Every loss against its formula, written token by token in double precision."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.config.catalog import POLICY_LOSSES

SETTINGS = dict(
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


def policy_gradient(row):
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


REFERENCES = {
    "vanilla": vanilla,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "geo_mean": geo_mean,
    "gmpo": geo_mean,
    "gpg": policy_gradient,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
    "reinforce": policy_gradient,
    "likelihood": likelihood,
}


def rows_of(log_probs, batch):
    """The written tokens of each row that has any."""
    rows = [[] for _ in range(len(batch))]
    fields = (batch.response_row, batch.response_mask, log_probs, batch.old_log_probs, batch.advantages, batch.chosen)
    for row, written, *token in zip(*(field.tolist() for field in fields), strict=True):
        rows[row] += [Token(*token)] if written else []
    return [row for row in rows if row]


@pytest.mark.parametrize("name", POLICY_LOSSES)
@given(seed=st.integers(0, 10_000))
def test_value_and_gradient_are_those_of_the_formula_on_ragged_rows(ragged, total, name, seed):
    log_probs, batch = ragged(seed)
    rows = rows_of(log_probs, batch)
    log_probs.requires_grad_()
    loss = total(name, log_probs, batch, THRESHOLDS if name.startswith("dppo") else SETTINGS)
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

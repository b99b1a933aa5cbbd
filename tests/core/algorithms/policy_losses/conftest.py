"""Ragged rows in double precision, single rows by hand, and losses summed up as in an update."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybridrl.config.catalog import POLICY_LOSSES
from hybridrl.core.algorithms.objective import Totals, token_weights
from hybridrl.core.batch import Batch
from hybridrl.core.required import required
from tests.core.algorithms.parameters import policy_loss

Ragged = Callable[..., tuple[Tensor, Batch]]
Total = Callable[..., Tensor]


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


@pytest.fixture(scope="session")
def total() -> Total:
    """A mini-batch's loss, or a pass's share of it, averaged as the loss of this name is, else over tokens."""

    def summed(name: str, log_probs: Tensor, batch: Batch, settings: dict[str, float], totals: Totals | None = None):
        loss, _ = policy_loss(name, **settings)(log_probs, batch)
        mode = POLICY_LOSSES[name].aggregation or "token-mean"
        return (loss * token_weights(batch, mode, totals or Totals.of(batch))).sum()

    return summed


@pytest.fixture(scope="session")
def one_row(make_batch) -> Callable[..., tuple[list[float], dict[str, list[float]], list[float]]]:
    """Loss a token, statistics and the gradient of the losses' sum, of one row whose tokens have these
    (probability before, probability now, advantage)."""

    def run(loss: Callable, cases: Sequence[tuple[float, float, float]], settings: dict[str, float], **fields: object):
        before, now, advantages = torch.tensor(cases).T
        batch = replace(make_batch([len(cases)], **fields), old_log_probs=before.log(), advantages=advantages)
        log_probs = now.log().requires_grad_()
        values, statistics = policy_loss(loss, **settings)(log_probs, batch)
        values.sum().backward()
        return (
            values.tolist(),
            {name: value.tolist() for name, value in statistics.items()},
            required(log_probs.grad).tolist(),
        )

    return run

"""The noise of a gradient, from the gradients of its rows."""

import pytest
import torch

from hybridrl.doctor.replay import described, noise

ACTOR = "actor_rollout_ref.actor"


def measured(gradients: torch.Tensor) -> tuple[list[float], list[tuple[list[int], float]]]:
    """The norms of the rows' shares of the gradients of updates, [updates, rows, parameters], and of the gradients."""
    updates, rows, _ = gradients.shape
    shares = gradients / rows
    numbers = torch.arange(updates * rows).view(updates, rows).tolist()
    return shares.flatten(0, 1).norm(dim=-1).tolist(), list(
        zip(numbers, shares.sum(1).norm(dim=-1).tolist(), strict=True)
    )


@pytest.mark.parametrize(("deviation", "scale"), [(0.5, 25), (2.0, 400)])
def test_the_noise_scale_is_the_variance_of_the_rows_over_the_square_of_their_mean(deviation, scale):
    """With a signal of 1 in each of 100 directions and this deviation in each of 10,000, S / |G|^2 is the scale."""
    generator = torch.Generator().manual_seed(0)
    signal = torch.cat([torch.ones(100), torch.zeros(9900)])
    gradients = signal + deviation * torch.randn(80, 8, 10_000, generator=generator)
    text = noise(*measured(gradients), prompts=4, of_update=2)
    needed = int(text.removeprefix("signal and noise are equal in a gradient of ").split()[0])
    assert needed == pytest.approx(scale, rel=0.2) and "and an update has 8" in text
    assert ("most of it is noise" in text) == (scale > 32)
    assert (f"set {ACTOR}.ppo_mini_batch_size=4" in text) == (scale > 32)


def test_rows_that_agree_have_no_noise_and_rows_that_have_nothing_in_common_nothing_else():
    assert noise(*measured(torch.ones(1, 4, 3)), 4, 2).startswith("signal and noise are equal in a gradient of 0 ")
    alone = noise(*measured(torch.eye(4)[None]), 2, 2)
    assert alone == (
        "the gradient of an update, of 4 responses, is nothing but noise; "
        "set actor_rollout_ref.rollout.n or data.train_batch_size higher"
    )


def test_a_single_row_or_a_gradient_of_zero_tells_nothing():
    assert "cannot be estimated" in noise(*measured(torch.ones(1, 1, 3)), 4, 2)
    assert "cannot be estimated" in noise(*measured(torch.zeros(1, 4, 3)), 4, 2)


def test_rows_without_a_gradient_have_no_share_of_it(make_batch):
    values = {name: torch.zeros(3) for name in ("old_log_probs", "rollout_log_probs", "advantages")}
    batch = make_batch([2, 1], rewards=[0.0, 0.0], **values)
    rows = described(batch, [0.0, 0.0], lambda ids: "")
    assert [(row["gradient"], row["share"]) for row in rows] == [(0.0, 0.0), (0.0, 0.0)]

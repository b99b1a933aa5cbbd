"""Updates that change nothing: those that are not finite, with the module at fault, and those without a gradient."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.core.algorithms.objective import Divisors
from hybridrl.core.training import token_outputs
from hybridrl.core.training.fsdp import full_tensor, local, reshard
from hybridrl.core.training.learner import Learner
from hybridrl.core.training.packing import MicroBatch
from hybridrl.core.training.planning import MiniBatch
from hybridrl.core.training.token_outputs import TokenOutputs
from tests.core.training.on_ranks import on_ranks
from tests.core.training.test_state import build, rows


def update(learner: Learner, weight: float, step: int) -> dict[str, float]:
    """One update of a loss of this weight; the first rank has a row, the others a dummy."""
    batch = rows(0)

    def loss(part: MicroBatch, totals: Divisors | None) -> tuple[Tensor, dict[str, Tensor]]:
        log_probs = learner.model(part.inputs, 1.0).log_probs
        return (0.0 if totals is None else weight) * log_probs.sum(), {}

    mini_batch = MiniBatch([[] if dist.get_rank() else [0]], Divisors.of(batch))
    return learner.update(batch, [mini_batch], loss, 1.0, step)[0]


def weights(learner: Learner) -> dict[str, Tensor]:
    return {name: full_tensor(value).clone() for name, value in learner.model.named_parameters()}


# -- on the ranks ------------------------------------------------------------------------------------------------------


def broken(path: str, directory: Path, module: str) -> tuple[float, float, int]:
    """An update with a weight of `module` that is not a number, and one with a weight of the loss that is not."""
    learner = build(path)
    hooks = sum(len(one._forward_hooks) for one in learner.model.modules())  # FSDP's
    learner.dump_prefix = directory / "actor"
    shares = update(learner, float("nan"), step=1)
    before = weights(learner)
    reshard(learner.model)
    with torch.no_grad():
        local(learner.model.get_submodule(module).get_parameter("weight")).fill_(torch.nan)
    second = update(learner, 1.0, step=2)
    same = sum(torch.equal(before[name], value) for name, value in weights(learner).items())
    left = sum(len(one._forward_hooks) for one in learner.model.modules()) - hooks
    return shares["skipped_updates"], second["skipped_updates"], len(before) - same, left


def without_gradient(path: str, skip: bool) -> tuple[list[dict[str, float]], list[bool], int]:
    """An update, and one of a loss of 0: the metrics, whether each moved the weights, and the number of updates."""
    learner, metrics, moved = build(path, skip_zero_gradient=skip), [], []
    for step, weight in enumerate([1.0, 0.0], start=1):
        before = weights(learner)
        metrics.append(update(learner, weight, step))
        moved.append(any(not torch.equal(before[name], value) for name, value in weights(learner).items()))
    return metrics, moved, learner.optimizers.updates


def early(path: str, right: bool) -> tuple[list[dict[str, float]], dict[str, Tensor], list[int]]:
    """Two updates of a loss that passes a gradient early, which is right or another one: the metrics, the weights, and
    how many repetitions there have been after each."""
    token_outputs.FEWEST_TOKENS, token_outputs.CHUNK_BYTES["cpu"] = 4, 1  # three chunks
    learner, batch, repeated, metrics, after = build(path), rows(0), [], [], []

    def of(outputs: TokenOutputs, span: slice) -> TokenOutputs:
        values = outputs.log_probs * torch.arange(1, 11)[span]
        return TokenOutputs(2 * outputs.log_probs if right else values)

    def loss(part: MicroBatch, _: Divisors | None) -> tuple[Tensor, dict[str, Tensor]]:
        given = of if learner.early_gradient else None
        log_probs = learner.model(part.inputs, 1.0, loss_gradient=given).log_probs
        return log_probs.square().sum(), {}

    for step in (1, 2):
        mini_batch = MiniBatch([[0, 1]], Divisors.of(batch))
        metrics += learner.update(batch, [mini_batch], loss, 1.0, step, on_retry=lambda: repeated.append(1))
        after.append(len(repeated))
    return metrics, weights(learner), after


# -- tests -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["model.model.layers.1.mlp.up_proj", "model.model.embed_tokens"])
def test_the_first_module_whose_output_is_not_finite_is_named_with_the_rows(directory, tmp_path, module):
    ranks = on_ranks(2, broken, directory, tmp_path, module)
    assert ranks == [(0.5, 0.5, 1, 0)] * 2, "half of a share a rank; only the spoilt weight has changed"
    of_loss, of_module = (torch.load(tmp_path / f"actor-step-{step}-update-1-rank-0.pt") for step in (1, 2))
    assert (of_loss["module"], of_module["module"]) == ("", module)
    assert of_module["response_ids"].tolist() and not list(tmp_path.glob("*rank-1.pt")), "it had a dummy row"


@pytest.mark.parametrize("skip", [False, True])
def test_an_update_without_a_gradient_moves_nothing_if_it_is_to_be_skipped(directory, skip):
    for metrics, moved, updates in on_ranks(2, without_gradient, directory, skip):
        assert moved == [True, not skip] and updates == 2
        assert [shares["skipped_updates"] for shares in metrics] == [0, 0]
        assert [shares.get("zero_gradient_share") for shares in metrics] == ([0, 0.5] if skip else [None, None])


def test_an_update_whose_loss_passed_another_gradient_early_is_repeated_without_it_and_no_later_one_passes_any(
    directory,
):
    ((metrics, moved, repeated), (right_metrics, right, unrepeated)) = (
        on_ranks(1, early, directory, passed)[0] for passed in (False, True)
    )
    assert (repeated, unrepeated) == ([1, 1], [0, 0])
    assert [shares["skipped_updates"] for shares in metrics] == [0, 0]
    assert metrics == [pytest.approx(shares, rel=1e-5) for shares in right_metrics]
    for name, value in moved.items():
        torch.testing.assert_close(value, right[name], rtol=1e-5, atol=1e-7)

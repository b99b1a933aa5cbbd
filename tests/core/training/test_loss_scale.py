"""float16: small gradients do not vanish, overflows are repeated, updates that are not finite are still skipped."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from hybridrl.core.algorithms.objective import Divisors
from hybridrl.core.training.fsdp import shard_and_fill
from hybridrl.core.training.layout import layout
from hybridrl.core.training.learner import Learner
from hybridrl.core.training.model import HOST, blank_language_model
from hybridrl.core.training.optimizer import FIRST_LOSS_SCALE, GROWTH_INTERVAL, LossScale, Optimizers
from hybridrl.core.training.packing import MicroBatch
from hybridrl.core.training.planning import MiniBatch
from hybridrl.core.training.state import load_state, state_of
from hybridrl.required import required
from tests.core.training.families import model_config
from tests.core.training.on_ranks import on_ranks
from tests.core.training.test_state import fsdp_config, optimizer_config, rows


def build(path: str, dtype: str) -> Learner:
    ranks, config = dist.get_world_size(), fsdp_config(dtype=dtype)
    blank = blank_language_model(model_config(path), torch.float32)
    model = shard_and_fill(blank, path, config, layout("cpu", ranks, ranks), HOST)
    optimizers = Optimizers(model, optimizer_config(), 9, getattr(torch, dtype))
    return Learner(model, config, HOST, padded=False, optimizers=optimizers, dump_prefix=Path("unused", "actor"))


def update(learner: Learner, weight: float) -> dict[str, float]:
    """One update of a loss of this weight; its shares of the metrics, and how often it was repeated."""
    batch, again = rows(0), []

    def loss(part: MicroBatch, totals: Divisors | None) -> tuple[Tensor, dict[str, Tensor]]:
        actual = learner.model(part.inputs, 1.0).log_probs
        return -weight * actual.sum() / (required(totals).tokens * dist.get_world_size()), {}

    mini_batch = MiniBatch([[0], [1]], Divisors.of(batch))
    (shares,) = learner.update(batch, [mini_batch], loss, 1e9, step=1, on_retry=lambda: again.append(1))
    return shares | {"again": len(again)}


# -- on the ranks ------------------------------------------------------------------------------------------------------


def norms(path: str, weight: float) -> list[float]:
    """The norm of the gradient of a loss of this weight, computed in float32, float16 and bfloat16."""
    types = ("float32", "float16", "bfloat16")
    return [update(build(path, dtype), weight)["grad_norm"] * dist.get_world_size() / weight for dtype in types]


def overflow(path: str, weight: float) -> tuple[dict[str, float], float, float]:
    learner = build(path, "float16")
    shares = update(learner, weight)
    return shares, learner.optimizers.loss_scale.factor, shares.get("grad_norm", 0.0) * dist.get_world_size() / weight


def broken_gradient(path: str) -> tuple[dict[str, float], float]:
    """An update whose loss is 0 and whose gradient is not a number, at any scale."""
    learner, batch = build(path, "float16"), rows(0)

    def loss(part: MicroBatch, totals: Divisors | None) -> tuple[Tensor, dict[str, Tensor]]:
        actual = learner.model(part.inputs, 1.0).log_probs
        return (actual - actual.detach()).abs().sqrt().sum(), {}

    (shares,) = learner.update(batch, [MiniBatch([[0, 1]], Divisors.of(batch))], loss, 1.0, step=1)
    return shares, learner.optimizers.loss_scale.factor


def saved_and_loaded(path: str, directory: Path) -> dict[str, tuple[float, int]]:
    """The scale of a run in float16, and its finite updates, by the type of the run that saved it."""
    found = {}
    for dtype in ("float16", "float32"):
        learner, again = build(path, dtype), build(path, "float16")
        learner.optimizers.loss_scale.load({"loss_scale": 128.0, "sound_updates": 7})
        dcp.save(state_of(learner.model, learner.optimizers, ["extra"]), checkpoint_id=directory / dtype)
        load_state(again.model, again.optimizers, ["extra"], directory / dtype, dist.group.WORLD)
        found[dtype] = again.optimizers.loss_scale.factor, again.optimizers.loss_scale.finite_updates
    return found


# -- tests -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [1.0, 1e-6], ids=["an ordinary loss", "a loss whose gradient float16 cannot hold"])
def test_the_gradient_is_that_of_float32(directory, weight):
    exact, float16, bfloat16 = on_ranks(2, norms, directory, weight)[0]
    assert float16 == pytest.approx(exact, rel=0.02) and bfloat16 == pytest.approx(exact, rel=0.1)


def test_a_gradient_that_overflows_is_repeated_with_a_smaller_scale_and_applied(directory):
    for shares, factor, norm in on_ranks(2, overflow, directory, 100.0):
        assert shares["skipped_updates"] == 0 and shares["again"] > 0
        assert factor == FIRST_LOSS_SCALE / 2 ** shares["again"] == shares["loss_scale"] * 2
        assert 0 < norm < float("inf")


def test_a_loss_that_is_not_finite_is_skipped_and_leaves_the_scale_alone(directory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for shares, factor, _ in on_ranks(1, overflow, directory, float("nan")):
        # Again once, to find the module at fault, and not with smaller scales.
        assert (shares["skipped_updates"], shares["again"], factor) == (1, 1, FIRST_LOSS_SCALE)


def test_a_gradient_that_is_broken_at_any_scale_is_skipped_and_leaves_the_scale_alone(directory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ((shares, factor),) = on_ranks(1, broken_gradient, directory)
    assert (shares["skipped_updates"], factor) == (1, FIRST_LOSS_SCALE)


def test_the_scale_is_saved_and_read_if_there_is_one(directory, tmp_path):
    (found,) = on_ranks(1, saved_and_loaded, directory, tmp_path)
    assert found == {"float16": (128.0, 7), "float32": (FIRST_LOSS_SCALE, 0)}


def test_the_scale_grows_after_many_finite_updates_and_ends_at_one():
    scale = LossScale(torch.float16)
    for _ in range(GROWTH_INTERVAL):
        assert scale.factor == FIRST_LOSS_SCALE
        scale.grow()
    assert scale.factor == 2 * FIRST_LOSS_SCALE
    shrunk = [scale.shrink() for _ in range(18)]
    assert shrunk == [True] * 17 + [False] and scale.factor == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types_have_no_scale(dtype):
    scale = LossScale(dtype)
    for _ in range(GROWTH_INTERVAL):
        scale.grow()
    assert (scale.factor, scale.shrink(), scale.state()) == (1, False, {})

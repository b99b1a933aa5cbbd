"""A model on a single rank is not sharded: it trains as FSDP would train it, and its checkpoints are the same."""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from hybridrl.core.training.fsdp import full_tensor, reshard, shard_and_fill
from hybridrl.core.training.layout import layout
from hybridrl.core.training.learner import Learner
from hybridrl.core.training.model import HOST, LanguageModel, blank_language_model, blank_value_model
from hybridrl.core.training.optimizer import Optimizers
from hybridrl.core.training.packing import pack_rows
from hybridrl.core.training.state import StateWriter, load_state, state_of
from hybridrl.required import required
from tests.core.training.families import model_config
from tests.core.training.on_ranks import on_ranks
from tests.core.training.test_state import ALL, fsdp_config, optimizer_config, rows, train, wait_for

UPDATES = range(10)
TIED = "all heads one key, tied head"
TYPES = ("float32", "bfloat16", "float16")
RUNS = [(TIED, False, "float32", dtype) for dtype in TYPES] + [(TIED, False, "bfloat16", "bfloat16")]
RUNS += [("two heads a key", True, "float32", dtype) for dtype in TYPES]


def build(path: str, dtype: str, *, fsdp: bool = False, critic: bool = False, stored: str = "float32") -> Learner:
    ranks, config = dist.get_world_size(), fsdp_config(dtype=dtype, model_dtype=stored)
    blank = (blank_value_model if critic else blank_language_model)(model_config(path), getattr(torch, stored))
    size: Callable[..., int] = dist.get_world_size
    with patch.object(dist, "get_world_size", lambda *group: size(*group) if group or not fsdp else 2):
        model = shard_and_fill(blank, path, config, layout("cpu", ranks, ranks), HOST)
    assert isinstance(model, FSDPModule) == (fsdp or ranks > 1)
    optimizers = Optimizers(model, optimizer_config(), len(UPDATES), getattr(torch, dtype))
    return Learner(model, config, HOST, padded=False, optimizers=optimizers, dump_prefix=Path("unused"))


def weights(learner: Learner) -> dict[str, Tensor]:
    reshard(learner.model)
    return {name: full_tensor(value.detach()).clone() for name, value in learner.model.named_parameters()}


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((value - theirs[name]).abs().max()) for name, value in ours.items())


# -- on the rank -------------------------------------------------------------------------------------------------------


def trained(path: str, dtype: str, critic: bool, stored: str) -> tuple[dict[str, Tensor], ...]:
    """The weights before and after ten updates of a model that is whole, and after those of one that is sharded."""
    whole, sharded = (build(path, dtype, fsdp=fsdp, critic=critic, stored=stored) for fsdp in (False, True))
    before = weights(whole)
    for learner in (whole, sharded):
        train(learner, UPDATES)
    return before, weights(whole), weights(sharded)


def save(learner: Learner, directory: Path) -> None:
    writer = StateWriter("cpu")
    writer.start({directory: state_of(learner.model, learner.optimizers, ALL)})
    wait_for(writer)


def saved(path: str, directory: Path) -> dict[str, Tensor]:
    """Save both after two updates; the weights."""
    for fsdp in (False, True):
        train(learner := build(path, "bfloat16", fsdp=fsdp), range(2))
        save(learner, directory / f"fsdp={fsdp}")
    return weights(learner)


def loaded(path: str, directory: Path) -> tuple[dict[str, Tensor], ...]:
    """The weights with which a run goes on, on any number of ranks, and those after another update."""
    learner = build(path, "bfloat16")
    load_state(learner.model, learner.optimizers, ALL, directory, required(dist.group.WORLD))
    before = weights(learner)
    train(learner, range(2, 3))
    return before, weights(learner)


def memory(path: str) -> tuple[list[int], int]:
    """Bytes of the copies while they are used and at the end, and of their gradients; and the number of parameters."""
    learner = build(path, "bfloat16")
    assert isinstance(learner.model, LanguageModel)
    loss = learner.model(pack_rows(rows(0), padded=False), 1.0).log_probs.sum()
    copies = required(required(learner.model.copies).copies).values()
    used = sum(copy.nbytes for copy in copies)
    loss.backward()
    gradients = sum(copy.grad.nbytes for copy in copies if copy.grad is not None)
    reshard(learner.model)
    return [used, sum(copy.nbytes for copy in copies), gradients], sum(p.numel() for p in learner.model.parameters())


def frozen(path: str) -> list[bool]:
    """For a frozen model: whether its outputs have a gradient, then whether each parameter is trained."""
    blank = blank_language_model(model_config(path), torch.float32).requires_grad_(False)
    model = shard_and_fill(blank, path, fsdp_config(dtype="bfloat16"), layout("cpu", 1, 1), HOST)
    assert isinstance(model, LanguageModel)
    outputs = model(pack_rows(rows(0), padded=False), 1.0).log_probs
    reshard(model)
    return [outputs.requires_grad, *(value.requires_grad for value in model.parameters())]


# -- tests -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "critic", "stored", "dtype"), RUNS)
def test_ten_updates_of_a_whole_model_are_those_of_a_sharded_one(directories, family, critic, stored, dtype):
    ((before, whole, sharded),) = on_ranks(1, trained, directories[family], dtype, critic, stored)
    assert difference(before, sharded) > 0.02, "ten updates at 0.01"
    assert difference(whole, sharded) <= 1e-6


def test_checkpoints_of_a_whole_model_and_of_a_sharded_one_are_read_by_the_other(directories, tmp_path):
    path = directories[TIED]
    (before,) = on_ranks(1, saved, path, tmp_path)
    resumed = [on_ranks(ranks, loaded, path, tmp_path / f"fsdp={fsdp}") for ranks in (1, 2) for fsdp in (False, True)]
    for ranks in resumed:
        assert difference(ranks[0][0], before) <= 1e-6
        assert difference(ranks[0][1], resumed[0][0][1]) <= 2e-2
    assert difference(resumed[0][0][0], resumed[2][0][0]) == 0, "one file, on one rank and on two"


def test_copies_take_memory_only_while_they_are_used_and_their_gradients_none(directories):
    (((used, released, gradients), parameters),) = on_ranks(1, memory, directories[TIED])
    assert (used, released, gradients) == (2 * parameters, 0, 0)


def test_a_frozen_model_stays_frozen(directories):
    ((has_gradient, *trained),) = on_ranks(1, frozen, directories[TIED])
    assert not has_gradient and len(trained) > 20 and not any(trained)

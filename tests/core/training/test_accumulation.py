"""Gradients of several micro-batches: their sum is that of all rows, and a single rank does not copy it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrl.core.algorithms.objective import Divisors
from hybridrl.core.training.learner import MiniBatch
from hybridrl.core.training.packing import MicroBatch, ModelInputs, pack_rows
from hybridrl.required import required
from tests.core.training.families import load_language_model, model_config
from tests.core.training.on_ranks import on_ranks, whole_gradient
from tests.core.training.test_loss_scale import build
from tests.core.training.test_state import rows

TIED = "all heads one key, tied head"
ROUNDING = {"float32": 1e-5, "bfloat16": 0.2}  # relative to the norm of a parameter's gradient
TWO, THREE = [[0], [1]], [[0], [1], [0]]


class Operations(TorchDispatchMode):
    """Counts what copies gradients to where they are reduced, and the gradients of embeddings as whole matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = {"chunk_cat": 0, "embedding_dense_backward": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (name := func.overloadpacket.__name__) in self.count:
            self.count[name] += 1
        return func(*args, **kwargs or {})


def loss_of(model: Any, inputs: ModelInputs) -> Tensor:
    return model(inputs, 1.0).log_probs.square().sum()


# -- on the ranks ------------------------------------------------------------------------------------------------------


def gradients(path: str, dtype: str, micro_batches: list[list[int]]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The gradient that micro-batches leave, twice in a row the same, and the operations that it took."""
    learner, batch = build(path, dtype), rows(0)

    def loss(part: MicroBatch, _: Divisors | None) -> tuple[Tensor, dict[str, Tensor]]:
        return loss_of(learner.model, part.inputs) / dist.get_world_size(), {}

    mini_batch = MiniBatch(micro_batches, Divisors.of(batch))
    first = whole_gradient(learner, batch, mini_batch, loss)
    with Operations() as made:
        again = whole_gradient(learner, batch, mini_batch, loss)
    assert all(torch.equal(first[name], value) for name, value in again.items())
    return again, made.count


def right(path: str, micro_batches: list[list[int]]) -> dict[str, Tensor]:
    """The gradient of these rows of every rank, of a model that is not sharded."""
    model = load_language_model(model_config(path), torch.float32)
    for part in micro_batches:
        loss_of(model, pack_rows(rows(0).select(part), padded=False)).backward()
    gradient = {name: required(value.grad) for name, value in model.named_parameters()}
    for value in gradient.values():
        dist.all_reduce(value)
        value.div_(dist.get_world_size())
    return gradient


def both(path: str, dtype: str, micro_batches: list[list[int]]) -> tuple[Any, ...]:
    return *gradients(path, dtype, micro_batches), right(path, micro_batches)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", [TIED, "two heads a key"])
def test_the_gradient_of_micro_batches_is_the_sum_of_theirs(directories, family, ranks, dtype):
    ((found, _, expected), *_) = on_ranks(ranks, both, directories[family], dtype, THREE)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert (value - expected[name]).norm() <= ROUNDING[dtype] * expected[name].norm(), name


def test_a_single_rank_copies_no_gradient_and_two_reduce_it_for_each_micro_batch(directories):
    parts = 3  # two layers, and the rest
    for ranks, copies in ((1, 0), (2, 3 * parts)):
        (_, made), *_ = on_ranks(ranks, gradients, directories[TIED], "float32", THREE)
        assert made["chunk_cat"] == copies


@pytest.mark.parametrize(("family", "matrices"), [(TIED, 0), ("two heads a key", 2)])
def test_the_gradient_of_an_embedding_is_a_whole_matrix_only_if_it_is_not_the_head(directories, family, matrices):
    (_, made), *_ = on_ranks(1, gradients, directories[family], "float32", TWO)
    assert made["embedding_dense_backward"] == matrices

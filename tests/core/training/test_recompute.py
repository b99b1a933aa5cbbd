"""Recomputation and compilation change what a micro-batch costs, but not what it computes."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrl.core.training.fsdp import compile_layers
from hybridrl.core.training.model import LanguageModel
from hybridrl.core.training.packing import pack_rows
from tests.core.training.families import load_language_model, model_config

RECOMPUTED = {"enable_gradient_checkpointing": True}
SELECTIVELY = RECOMPUTED | {"selective_checkpointing": True}


class Operations(TorchDispatchMode):
    """Counts matrix products, and multiplications as an example of what costs little."""

    def __init__(self) -> None:
        super().__init__()
        self.count = {"mm": 0, "mul": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (name := func.overloadpacket.__name__) in self.count:
            self.count[name] += 1
        return func(*args, **kwargs or {})


def load(directory: str, **changes: bool) -> LanguageModel:
    return load_language_model(model_config(directory, **changes), torch.float32).train()


def gradients(model: LanguageModel, rows) -> tuple[Tensor, ...]:
    log_probs = model(pack_rows(rows, padded=False), 1.0).log_probs
    return torch.autograd.grad(log_probs.square().sum(), tuple(model.parameters()))


def counted(directory: str, rows, **changes: bool) -> tuple[tuple[Tensor, ...], dict[str, int]]:
    with Operations() as made:
        actual = gradients(load(directory, **changes), rows)
    return actual, made.count


def test_selective_recomputation_repeats_cheap_operations_and_no_matrix_product(directory, rows):
    kept, none = counted(directory, rows)
    recomputed, every = counted(directory, rows, **RECOMPUTED)
    selected, cheap = counted(directory, rows, **SELECTIVELY)
    torch.testing.assert_close(recomputed, kept, rtol=0, atol=0)
    torch.testing.assert_close(selected, kept, rtol=0, atol=0)
    assert none["mm"] == cheap["mm"] < every["mm"]
    assert none["mul"] < cheap["mul"] == every["mul"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, RECOMPUTED], ids=["kept", "recomputed"])
def test_compiled_layers_compute_the_same_and_are_compiled_for_any_lengths(directory, rows, options):
    expected = [gradients(load(directory, **options), rows.select(chosen)) for chosen in ([0, 1], [0], [1])]
    model = load(directory, **options)
    # Traced and differentiated as usual, but not compiled to C++ or Triton, which takes half a minute.
    compile_layers(list(model.model.model.layers), "aot_eager")
    actual = []
    for chosen in ([0, 1], [0], [1]):
        counters["stats"].clear()
        actual.append(gradients(model, rows.select(chosen)))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 0  # at the third number of tokens

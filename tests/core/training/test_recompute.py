"""Recomputation and compilation change what a micro-batch costs, but not what it computes."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._functorch import config as functorch
from transformers import AutoModelForCausalLM, Qwen2Config

from hybridrl.core.training.fsdp import compile_layers
from hybridrl.core.training.loading import KEPT
from hybridrl.core.training.model import LanguageModel
from hybridrl.core.training.packing import pack_rows
from tests.core.training.families import SMALL, load_language_model, model_config

RECOMPUTED = {"enable_gradient_checkpointing": True}


def load(directory: str, **changes: object) -> LanguageModel:
    return load_language_model(model_config(directory, **changes), torch.float32).train()


def gradients(model: LanguageModel, rows) -> tuple[Tensor, ...]:
    log_probs = model(pack_rows(rows, padded=False), 1.0).log_probs
    return torch.autograd.grad(log_probs.square().sum(), tuple(model.parameters()))


@pytest.fixture
def three_layers(tmp_path) -> str:
    torch.manual_seed(0)
    settings = SMALL | {"num_hidden_layers": 3, "num_key_value_heads": 2}
    AutoModelForCausalLM.from_config(Qwen2Config(**settings)).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize(("every", "times"), [(False, [1, 1, 1]), (2, [2, 1, 2]), (True, [2, 2, 2]), (None, [2, 2, 2])])
def test_layers_are_computed_once_or_twice_and_gradients_are_the_same(three_layers, rows, every, times):
    expected = gradients(load(three_layers), rows)
    model, calls = load(three_layers, enable_gradient_checkpointing=every), [0, 0, 0]

    def count(layer: int, *_: object) -> None:
        calls[layer] += 1

    for index, layer in enumerate(model.model.model.layers):
        layer.self_attn.register_forward_hook(partial(count, index))
    torch.testing.assert_close(gradients(model, rows), expected, rtol=0, atol=0)
    assert calls == times


def test_random_numbers_are_repeated_only_where_activations_may_be_dropped(three_layers, rows):
    dropping = {"override_config": {"attention_dropout": 0.5}}
    for changes, repeated in (({}, False), (dropping, True), ({"lora": {"dropout": 0.1, "merge": False}}, True)):
        model = load(three_layers, **RECOMPUTED, **changes)
        assert model.model.model.layers[0]._gradient_checkpointing_func.keywords["preserve_rng_state"] == repeated


def kept_bytes(model: LanguageModel, rows) -> int:
    """The bytes that the layers keep for the backward pass, without parameters."""
    parameters, kept = {parameter.data_ptr() for parameter in model.parameters()}, {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in parameters:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model.hidden_states(pack_rows(rows, padded=False))
    return sum(kept.values())


@pytest.mark.slow
def test_layers_compiled_selectively_keep_less_and_compute_the_same(three_layers, rows):
    expected, kept = gradients(load(three_layers), rows), []
    with functorch.patch(activation_memory_budget=1.0):  # restored afterwards
        for selective in (False, True):
            torch.compiler.reset()
            model = load(three_layers, selective_checkpointing=selective)
            compile_layers(list(model.model.model.layers), "aot_eager")
            torch.testing.assert_close(gradients(model, rows), expected, rtol=1e-3, atol=1e-4)
            kept.append(kept_bytes(model, rows))
        assert functorch.activation_memory_budget == KEPT
    assert kept[1] < 0.9 * kept[0]


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

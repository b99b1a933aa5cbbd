"""A model's tensors under the names of its family's checkpoints."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Glm4MoeConfig, Qwen2Config, Qwen3MoeConfig

from hybridrl.checkpoint.export import as_published, own_tensors, parts
from hybridrl.checkpoint.read import read_safetensors
from hybridrl.checkpoint.tensors import Tensors
from hybridrl.core.training.loading import fill
from hybridrl.core.training.model import HOST, blank_language_model
from tests.core.training.families import model_config
from tests.vision_models import EXPERTS as EXPERTS_THAT_SEE
from tests.vision_models import FAMILIES, write_model_that_sees

SMALL = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "moe_intermediate_size": 6,
    "num_experts_per_tok": 2,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
EXPERTS = Qwen3MoeConfig(**SMALL, num_experts=3)


def make(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@pytest.fixture(scope="module", params=[*FAMILIES, "qwen3_vl_moe, square"])
def sees(request, tmp_path_factory) -> Path:
    """A model that sees, with files as published; the experts of one have as many columns as rows."""
    family, _, square = request.param.partition(", ")
    with pytest.MonkeyPatch.context() as patch:
        if square:
            patch.setitem(EXPERTS_THAT_SEE, "moe_intermediate_size", 32)  # gate and up: 64 x 64
        return write_model_that_sees(tmp_path_factory.mktemp("sees") / family, family)


def in_memory(tensors: dict[str, torch.Tensor]) -> Tensors:
    meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
    return Tensors("in memory", meta, lambda name: [([0] * tensors[name].dim(), tensors[name])])


def test_a_dense_models_tensors_are_published_unchanged():
    model = make(Qwen2Config(**SMALL, tie_word_embeddings=True))
    all_parts = parts(model, torch.bfloat16)
    assert [part.names for part in all_parts] == [(name,) for name, _ in model.named_parameters()]
    assert {tensor.dtype for part in all_parts for tensor in part.published.values()} == {torch.bfloat16}


def test_the_experts_of_a_layer_are_one_part_and_are_published_separately():
    experts = [part for part in parts(make(EXPERTS)) if len(part.names) > 1]
    assert [part.names for part in experts] == [
        tuple(f"model.layers.{layer}.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")) for layer in (0, 1)
    ]
    assert {name: list(tensor.shape) for name, tensor in experts[1].published.items()} == {
        f"model.layers.1.mlp.experts.{expert}.{name}.weight": [8, 6] if name == "down_proj" else [6, 8]
        for expert in range(3)
        for name in ("gate_proj", "up_proj", "down_proj")
    }


def test_tensors_saved_under_the_models_own_names_are_converted(tmp_path):
    model = make(EXPERTS)
    model.save_pretrained(tmp_path)
    expected, converted = read_safetensors(tmp_path), as_published(in_memory(own_tensors(model)), model)
    assert converted.meta.keys() == expected.meta.keys()
    assert all(torch.equal(converted.read(name), expected.read(name)) for name in expected.meta)
    assert all(converted.meta[name].shape == tensor.shape for name, tensor in expected.meta.items())


def test_tensors_that_were_saved_as_published_are_not_converted(tmp_path):
    model = make(EXPERTS)
    model.save_pretrained(tmp_path)
    saved = read_safetensors(tmp_path)
    assert as_published(saved, model) is saved


def test_persistent_buffers_belong_to_the_model_and_keep_their_type():
    config = Glm4MoeConfig(
        **SMALL, n_routed_experts=3, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1
    )
    model = make(config)
    correction = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert [name for name in own_tensors(model) if name not in dict(model.named_parameters())] == [correction]
    types = {name: tensor.dtype for part in parts(model, torch.bfloat16) for name, tensor in part.published.items()}
    assert [name for name, dtype in types.items() if dtype == torch.float32] == [correction]


def test_a_model_that_sees_is_published_as_it_was_read(sees):
    """transformers transposes the experts of Qwen3-VL-MoE when it reads them, but not back; square ones never."""
    model = fill(blank_language_model(model_config(str(sees)), torch.float32).model, str(sees), HOST)
    tensors = {name: tensor.detach() for name, tensor in own_tensors(model).items()}
    written, planned = {}, {}
    for part in parts(model, torch.float32):
        written |= part.publish(model, {name: tensors[name] for name in part.names})
        planned |= {name: tensor.shape for name, tensor in part.published.items()}
    expected, saved = load_file(sees / "model.safetensors"), as_published(in_memory(tensors), model)
    assert written.keys() == expected.keys() == planned.keys() == saved.meta.keys()
    for name, tensor in expected.items():
        assert torch.equal(written[name], tensor) and torch.equal(saved.read(name), tensor), name
        assert planned[name] == tensor.shape, name


def test_experts_that_transformers_saved_itself_are_read_as_they_are(tmp_path):
    directory = write_model_that_sees(tmp_path / "published", "qwen3_vl_moe")
    AutoModelForImageTextToText.from_pretrained(directory).save_pretrained(tmp_path / "saved")
    read = (
        fill(blank_language_model(model_config(str(path)), torch.float32).model, str(path), HOST)
        for path in (directory, tmp_path / "saved")
    )
    for ours, theirs in zip(*(model.parameters() for model in read), strict=True):
        assert torch.equal(ours, theirs)

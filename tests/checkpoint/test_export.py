import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    GenerationConfig,
    GPT2Config,
    PreTrainedModel,
    Qwen2Config,
)

from hybridrl.checkpoint.export import export_model
from hybridrl.checkpoint.files import forget_missing_code
from hybridrl.core.batch import Batch
from hybridrl.core.training import attention
from hybridrl.core.training.packing import pack_rows
from tests.checkpoint.own_code import CODE, save_with_code
from tests.checkpoint.shards import load_all
from tests.core.training.families import load_value_model, model_config

FLOAT, HALF = torch.float32, torch.bfloat16


def small_model(*, tied: bool) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        architectures=["Qwen2ForCausalLM"],
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)


def all_tensors(model: PreTrainedModel):
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def assert_loads_as(directory: Path, model: PreTrainedModel, dtype: torch.dtype) -> None:
    loaded = load_all(AutoModelForCausalLM, directory, dtype="auto")
    expected = model.to(dtype).state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, value in loaded.state_dict().items():
        assert value.dtype == dtype and torch.equal(value, expected[name]), name


@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
@pytest.mark.parametrize("limit", [5 << 30, 700], ids=["one file", "several files"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied head", "own head"])
def test_transformers_loads_what_was_written(tmp_path, tied, limit, dtype):
    model = small_model(tied=tied)
    export_model(iter(all_tensors(model)), model, tmp_path / "model", dtype, writes=True, limit=limit)
    assert_loads_as(tmp_path / "model", model, dtype)


def test_a_large_model_is_split_into_files_below_the_limit_with_an_index(tmp_path):
    model = small_model(tied=False)
    export_model(all_tensors(model), model, tmp_path, FLOAT, writes=True, limit=700)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert [file.name for file in files] == [
        f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))
    ]
    total = 0
    for file in files:
        held = load_file(file)
        assert set(held) == {name for name, place in index["weight_map"].items() if place == file.name}
        size = sum(value.nbytes for value in held.values())
        assert size <= 700 or len(held) == 1
        total += size
    assert index["metadata"]["total_size"] == total


def test_the_weights_and_the_configuration_have_the_requested_type(tmp_path):
    model = small_model(tied=True)
    export_model(all_tensors(model), model, tmp_path, HALF, writes=True)
    assert AutoConfig.from_pretrained(tmp_path).dtype == HALF
    assert model.config.dtype != HALF


def test_the_configuration_has_the_architecture_and_no_internal_names(tmp_path):
    model = small_model(tied=True)
    export_model(all_tensors(model), model, tmp_path, FLOAT, writes=True)
    text = (tmp_path / "config.json").read_text()
    assert json.loads(text)["architectures"] == ["Qwen2ForCausalLM"]
    assert attention.NAME not in text


@pytest.mark.parametrize("family", ["qwen2", "learned positions"])
def test_a_value_model_has_the_same_values_in_transformers_and_here(tmp_path, family):
    settings = {"vocab_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    family_settings = {
        "qwen2": Qwen2Config(**settings, hidden_size=8, intermediate_size=8, num_key_value_heads=1),
        "learned positions": GPT2Config(**settings, n_embd=8),
    }
    AutoModelForCausalLM.from_config(family_settings[family]).save_pretrained(tmp_path / "start")
    model = load_value_model(model_config(str(tmp_path / "start")), FLOAT)
    torch.manual_seed(0)
    torch.nn.init.normal_(model.model.get_submodule(model.head_name).weight)
    export_model(all_tensors(model.model), model.model, tmp_path / "saved", FLOAT, writes=True)
    inputs = pack_rows(one_row(), padded=False)
    again = load_value_model(model_config(str(tmp_path / "saved")), FLOAT)
    assert torch.equal(again(inputs), model(inputs))
    reloaded = load_all(AutoModelForTokenClassification, tmp_path / "saved")
    values = reloaded.eval()(inputs.input_ids).logits[0, inputs.predictors, 0]
    torch.testing.assert_close(values, model(inputs))
    assert reloaded.config.architectures == [type(reloaded).__name__]


def one_row() -> Batch:
    """A prompt of two tokens and a response of three."""
    return Batch(
        prompt_lengths=torch.tensor([2]),
        response_lengths=torch.tensor([3]),
        prompt_ids=torch.tensor([4, 9]),
        response_ids=torch.tensor([1, 15, 6]),
        group=torch.tensor([0]),
        position=torch.tensor([0]),
        sample=torch.tensor([0]),
    )


def test_a_rank_that_cannot_write_exhausts_the_tensors(tmp_path):
    model = small_model(tied=True)
    walk = iter(all_tensors(model))
    (tmp_path / "model").write_text("in the way")
    with pytest.raises(OSError, match="File exists"):
        export_model(walk, model, tmp_path / "model", FLOAT, writes=True)
    assert next(walk, None) is None


def test_a_rank_that_does_not_write_exhausts_the_tensors(tmp_path):
    model = small_model(tied=True)
    walk = iter(all_tensors(model))
    export_model(walk, model, tmp_path / "model", FLOAT, writes=False)
    assert next(walk, None) is None
    assert not (tmp_path / "model").exists()


def test_a_models_custom_code_is_kept(tmp_path):
    save_with_code(tmp_path / "start")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "start", trust_remote_code=True)
    export_model(all_tensors(model), model, tmp_path / "saved", FLOAT, writes=True)
    for name in CODE:
        assert (tmp_path / "saved" / name).read_text() == (tmp_path / "start" / name).read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    assert type(again).__name__ == "MineForCausalLM"
    assert torch.equal(again(torch.arange(9)[None]).logits, model(torch.arange(9)[None]).logits)


@pytest.mark.parametrize("prefix", ["", "somebody/model--"])
def test_files_of_code_that_was_not_trusted_are_not_named(tmp_path, prefix):
    """Whoever trusts code would look for files that a model of transformers' own class does not have."""
    model = small_model(tied=True)
    model.config.auto_map = {"AutoConfig": f"{prefix}configuration_old.OldConfig", "AutoModel": f"{prefix}old.OldModel"}
    export_model(all_tensors(model), model, tmp_path, FLOAT, writes=True)
    for trusted in (False, True):
        again = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=trusted)
        assert type(again) is type(model)
        assert torch.equal(again(torch.arange(9)[None]).logits, model(torch.arange(9)[None]).logits)


def test_only_files_that_are_missing_are_not_named(tmp_path):
    """As a merge finds them in a directory that others wrote, with a tokenizer's."""
    (tmp_path / "tok.py").touch()
    written = {"model_type": "a", "auto_map": {"AutoTokenizer": ["tok.Slow", None], "AutoConfig": "settings.Mine"}}
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps(written))
    forget_missing_code(tmp_path)
    for name in ("config.json", "tokenizer_config.json"):
        kept = json.loads((tmp_path / name).read_text())
        assert kept == {"model_type": "a", "auto_map": {"AutoTokenizer": ["tok.Slow", None]}}


def test_generation_settings_are_kept_even_if_transformers_would_not_save_them(tmp_path):
    model = small_model(tied=True)
    model.generation_config = GenerationConfig(eos_token_id=[3, 5], do_sample=False, temperature=0.5)
    export_model(all_tensors(model), model, tmp_path, FLOAT, writes=True)
    kept = GenerationConfig.from_pretrained(tmp_path)
    assert (kept.eos_token_id, kept.do_sample, kept.temperature) == ([3, 5], False, 0.5)

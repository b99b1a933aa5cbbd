"""A model's files with values of other kinds are rejected before anything heavy: by file, field and value."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import Qwen2Config, Qwen2Tokenizer

from hybridrl.config import ConfigError, PPOConfig, load_ppo_config
from hybridrl.data.tokenizer import load_tokenizer

NUMBERS = {"negative": -5, "true": True, "NaN": float("nan"), "huge": 10**400}
TYPES = {"a text": "x", "a list": [[]], "an object": {"a": 1}, **NUMBERS}
QUICK = ("a text", "a list", "missing")  # the kinds that are not marked slow
FIELDS = {
    "config.json": {
        "vocab_size": (*TYPES, "null", "zero"),
        "hidden_size": (*TYPES, "null", "zero"),
        "num_attention_heads": (*TYPES, "null", "zero"),
        "num_key_value_heads": (*TYPES, "zero"),
        "max_position_embeddings": (*TYPES, "zero"),
        "rms_norm_eps": TYPES,
        "eos_token_id": TYPES,
        "rope_scaling": [kind for kind in TYPES if kind != "an object"],
        "quantization_config": [kind for kind in TYPES if kind != "an object"],
        "tie_word_embeddings": [kind for kind in TYPES if kind != "true"],
        "architectures": TYPES,
        "model_type": [kind for kind in TYPES if kind != "a text"],
    },
    "generation_config.json": {"eos_token_id": TYPES, "temperature": TYPES, "top_k": [*TYPES][:3]},
    "adapter_config.json": {
        "r": (*TYPES, "null", "zero", "missing"),
        "lora_alpha": (*TYPES, "null", "missing"),
        "target_modules": ("a list", "an object", "negative", "true", "null", "missing"),
        "base_model_name_or_path": [kind for kind in TYPES if kind != "a text"],
    },
    "tokenizer_config.json": {
        "eos_token": ("a list", "negative", "true", "NaN"),
        "chat_template": ("negative", "true"),
        "added_tokens_decoder": ("a text", "a list", "negative"),
        "tokenizer_class": ("a list", "an object", "negative"),
    },
}
CASES = [
    pytest.param(file, field, kind, marks=[] if kind in QUICK else [pytest.mark.slow])
    for file, fields in FIELDS.items()
    for field, kinds in fields.items()
    for kind in kinds
]
CONTENTS = {"empty": b"", "a list": b"[]", "a text": b'"x"', "cut": b"{", "no UTF-8": b"\xff", "deep": b"[" * 5000}


@pytest.fixture(scope="module")
def made_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made")
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    Qwen2Config(vocab_size=320, num_key_value_heads=2, max_position_embeddings=4096, **sizes).save_pretrained(directory)
    (directory / "model.safetensors").touch()
    (directory / "generation_config.json").write_text('{"eos_token_id": [1, 2], "temperature": 0.7, "top_k": 20}')
    tokenizer = Qwen2Tokenizer(eos_token="<|im_end|>")
    tokenizer.train_new_from_iterator([""], vocab_size=300, show_progress=False).save_pretrained(directory)
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (directory / "adapter").mkdir()
    (directory / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture
def model(made_model: Path, tmp_path: Path) -> Path:
    (tmp_path / "train.jsonl").write_text("{}")
    return Path(shutil.copytree(made_model, tmp_path / "model"))


def load(model: Path) -> PPOConfig:
    """Load the configuration of a run with this model and adapter, and its tokenizer."""
    keys = [f"data.train_files={model.parent}/train.jsonl", f"actor_rollout_ref.model.path={model}"]
    keys += [f"actor_rollout_ref.model.lora_adapter_path={model}/adapter", "trainer.device=cpu"]
    config = load_ppo_config(keys)
    load_tokenizer(str(model))
    return config


def path_of(model: Path, file: str) -> Path:
    return model / "adapter" / file if file == "adapter_config.json" else model / file


def test_the_files_of_the_test_are_accepted(model):
    assert load(model).actor_rollout_ref.model.lora_rank == 8


@pytest.mark.parametrize(("file", "field", "kind"), CASES)
def test_a_field_of_another_kind_is_rejected_by_file_field_and_value(model, file, field, kind):
    settings = json.loads(path_of(model, file).read_text())
    if kind == "missing":
        del settings[field]
    else:
        settings[field] = {**TYPES, "null": None, "zero": 0}[kind]
    path_of(model, file).write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=f"its {file} has (no )?{field}"):
        load(model)


@pytest.mark.parametrize("file", FIELDS)
@pytest.mark.parametrize("kind", [*CONTENTS, "a loop"])
def test_a_file_that_holds_no_names_and_values_is_rejected_by_name(model, file, kind):
    path_of(model, file).unlink()
    if kind == "a loop":
        path_of(model, file).symlink_to(file)
    else:
        path_of(model, file).write_bytes(CONTENTS[kind])
    with pytest.raises(ConfigError, match=file):
        load(model)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b'{"version": "1.0", "model": {"type": "x"}}'])
def test_a_damaged_tokenizer_is_rejected(model, content):
    (model / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        load(model)

"""The models of a run: each reads the tokens of the policy's ids as they are meant, and takes its rows."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import GraniteConfig, PreTrainedTokenizerFast

from hybridrl.config.findings import Findings
from hybridrl.data.tokenizer import load_tokenizer
from hybridrl.runs.models import check_readers, run_models
from tests.core.training.families import model_config

SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]
ALPHABET, MERGED = 256, 30
TOKENS = ALPHABET + MERGED + len(SPECIAL)
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's directory with a tokenizer of bytes, and one row more than it has tokens."""
    made = Tokenizer(BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=ALPHABET + MERGED, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["What is the answer? In 2024 it was 2024 times one mask.\n" * 9], trainer)
    directory = tmp_path_factory.mktemp("models") / "policy"
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=SPECIAL[0], extra_special_tokens=SPECIAL[1:])
    fast.save_pretrained(directory)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings.pop("extra_special_tokens")  # tokenizer.json has them
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    config(directory)
    return directory


def config(directory: Path, rows: int = TOKENS + 1, **settings: object) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 1, "num_hidden_layers": 1, "max_position_embeddings": 64}
    GraniteConfig(vocab_size=rows, **{**sizes, **settings}).save_pretrained(directory)  # of no tokenizer class


@pytest.fixture
def another(policy: Path, tmp_path: Path) -> Callable[[Change], Path]:
    """Make another model, with a tokenizer that is changed in tokenizer.json."""

    def make(change: Change) -> Path:
        for file in policy.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        written = json.loads((tmp_path / "tokenizer.json").read_text())
        change(written)
        (tmp_path / "tokenizer.json").write_text(json.dumps(written))
        return tmp_path

    return make


def errors(policy: Path, *, longest: int = 64, **other: Any) -> list[str]:
    """The errors about a critic next to the policy, by what differs in its section."""
    critic = model_config(**{"path": str(policy), **other})
    models = {"actor_rollout_ref.model": model_config(str(policy)), "critic.model": critic}
    findings = Findings()
    check_readers(models, load_tokenizer(str(policy)), longest, "lower it", findings)
    return [error.text for error in findings.errors]


def swap_tokens(written: dict[str, Any]) -> None:
    vocabulary = written["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def swap_special(written: dict[str, Any]) -> None:
    one, two = written["added_tokens"][1:3]
    one["content"], two["content"] = two["content"], one["content"]


DIGITS = {"type": "Digits", "individual_digits": True}
CHANGES: dict[str, tuple[Change, str]] = {
    "tokens": (swap_tokens, "has 'b' where the policy's has the token 'a', at "),
    "special tokens": (swap_special, "where the policy's has the added token '<|user|>', at 287 (2 of "),
    "fewer tokens": (
        lambda written: written["added_tokens"].pop(),
        "has no token where the policy's has the added token '<|assistant|>', at 288 (1 of 289 differ)",
    ),
    "the order of merges": (lambda written: written["model"]["merges"].reverse(), "its tokenizer divides "),
    "a lost merge": (lambda written: written["model"]["merges"].pop(), "its tokenizer divides "),
    "lower case": (lambda written: written.update(normalizer={"type": "Lowercase"}), "its tokenizer divides What is"),
    "composed letters": (lambda written: written.update(normalizer={"type": "NFC"}), "its tokenizer divides "),
    "digits": (
        lambda written: written["pre_tokenizer"].update(
            {"type": "Sequence", "pretokenizers": [dict(written["pre_tokenizer"]), DIGITS]}
        ),
        "its tokenizer divides ",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_with_another_tokenizer_is_rejected_with_what_differs(policy, another, change):
    edit, words = CHANGES[change]
    other = another(edit)
    (error,) = errors(policy, path=str(other))
    assert error.startswith(f"critic.model.path={other}: it reads the policy's token ids, and its tokenizer ")
    assert words in error and "save that tokenizer there" in error


@pytest.mark.parametrize("place", ["own tokenizer", "base"])
def test_an_adapter_that_was_trained_with_another_tokenizer_is_rejected(policy, another, place, tmp_path_factory):
    other, adapter = another(swap_tokens), tmp_path_factory.mktemp("adapter")
    place = other if place == "base" else adapter
    if place == adapter:
        for file in other.glob("tokenizer*"):
            (adapter / file.name).write_bytes(file.read_bytes())
    settings = {"base_model_name_or_path": str(place if place == other else policy)}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    (error,) = errors(policy, lora_adapter_path=str(adapter))
    assert error.startswith(f"critic.model.lora_adapter_path={adapter}")
    assert ("trained on" in error) == (place == other) and "has 'b' where the policy's has the token 'a'" in error


def test_the_same_tokenizer_more_tokens_and_none_are_accepted(policy, another):
    def add(written: dict[str, Any]) -> None:
        written["added_tokens"].append({**written["added_tokens"][-1], "id": TOKENS, "content": "<|more|>"})

    assert errors(policy, path=str(another(lambda written: None))) == []
    assert errors(policy, path=str(another(add))) == []
    for file in (other := another(add)).glob("tokenizer*"):
        file.unlink()
    assert errors(policy, path=str(other)) == []


@pytest.mark.parametrize(("rows", "rejected"), [(TOKENS - 64, True), (TOKENS - 1, True), (TOKENS, False), (999, False)])
def test_rows_cover_the_tokens_of_the_policy_but_may_be_more_or_fewer(policy, another, rows, rejected):
    config(other := another(lambda written: None), rows)
    wrong = f"critic.model.path={other}: its embedding and head have {rows} rows, and the policy 289 tokens; "
    assert errors(policy, path=str(other)) == [f"{wrong}name another model, or resize its token embeddings"] * rejected


def test_tokens_that_the_policy_itself_has_no_row_for_are_not_missed(policy, another):
    config(other := another(lambda written: written["added_tokens"].pop()), TOKENS - 1)
    models = {"actor_rollout_ref.model": model_config(str(other)), "critic.model": model_config(str(policy))}
    check_readers(models, load_tokenizer(str(policy)), 64, "", findings := Findings())
    assert findings.errors == []


def test_positions_are_those_of_the_longest_row_unless_a_factor_extends_them(policy, another):
    config(other := another(lambda written: None), max_position_embeddings=32)
    assert errors(policy, path=str(other)) == [
        f"critic.model.path={other}: the model takes 32 positions, a row may have 64; lower it"
    ]
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
    config(other, max_position_embeddings=32, rope_parameters=rope)
    assert errors(policy, path=str(other)) == []
    assert [error[:30] for error in errors(policy, longest=65)] == ["actor_rollout_ref.model.path=/"], "once"


def test_the_models_of_a_run_are_those_that_it_uses():
    policy = model_config("policy", lora_rank=8)
    section = SimpleNamespace(model=policy, ref=SimpleNamespace(model=SimpleNamespace(path="reference")))
    settings: Any = SimpleNamespace(actor_rollout_ref=section, critic=SimpleNamespace(model=model_config("critic")))

    def of(*, reference: bool, critic: bool) -> dict:
        algorithm: Any = SimpleNamespace(uses_reference=reference, uses_critic=critic)
        return run_models(settings, algorithm)

    key = "actor_rollout_ref.ref.model"
    assert of(reference=False, critic=False) == {"actor_rollout_ref.model": policy}
    assert list(of(reference=True, critic=True)) == ["actor_rollout_ref.model", key, "critic.model"]
    assert of(reference=True, critic=False)[key] == replace(policy, path="reference", lora_rank=0)

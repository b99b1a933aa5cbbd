"""The models of a run: each reads the tokens of the policy's ids as they are meant, and takes its rows."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import GraniteConfig

from hybridrl.config.findings import Findings
from hybridrl.config.load import load_ppo_config
from hybridrl.data.tokenizer import load_tokenizer
from hybridrl.runs.models import check_readers, run_models
from hybridrl.runs.settings import build_algorithm
from tests.core.training.families import model_config
from tests.data import stand_ins
from tests.sections import keys_of_run


def made(digits: int = 3) -> Tokenizer:
    """A tokenizer of bytes whose last tokens are added ones."""
    tokenizer = stand_ins.of_bytes(digits)
    tokenizer.add_special_tokens(["<|user|>", "<|assistant|>"])
    return tokenizer


TOKENS = made().get_vocab_size()
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's directory with one row more than its tokenizer has tokens."""
    place = tmp_path_factory.mktemp("models") / "policy"
    config(stand_ins.write(place, made, "PreTrainedTokenizerFast", "granite"))
    return place


def config(directory: Path, rows: int = TOKENS + 1, positions: int = 64, **settings: object) -> None:
    sizes = {"vocab_size": rows, "hidden_size": 32, "num_attention_heads": 1, "num_hidden_layers": 1}
    # Of no tokenizer class.
    GraniteConfig(**sizes, max_position_embeddings=positions, **settings).save_pretrained(directory)


@pytest.fixture
def another(policy: Path, tmp_path: Path) -> Callable[[Change], Path]:
    """Make another model, with a tokenizer that is changed in tokenizer.json."""

    def make(change: Change) -> Path:
        shutil.copytree(policy, tmp_path, dirs_exist_ok=True)
        written = json.loads((tmp_path / "tokenizer.json").read_text())
        change(written)
        (tmp_path / "tokenizer.json").write_text(json.dumps(written))
        return tmp_path

    return make


def errors(policy: Path, **other: Any) -> list[str]:
    """The errors about a critic next to the policy, by what differs in its section."""
    critic = model_config(**{"path": str(policy), **other})
    models = {"actor_rollout_ref.model": model_config(str(policy)), "critic.model": critic}
    findings = Findings()
    check_readers(models, load_tokenizer(str(policy)), findings)
    return [error.text for error in findings.errors]


def swap_tokens(written: dict[str, Any]) -> None:
    vocabulary = written["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


CHANGES: dict[str, tuple[Change, str]] = {
    "tokens": (swap_tokens, "has 'b' where the policy's has the token 'a', at "),
    "special tokens": (
        lambda written: written["added_tokens"][-1].update(content="<|other|>"),
        f"has '<|other|>' where the policy's has the added token '<|assistant|>', at {TOKENS - 1} (1 of {TOKENS} ",
    ),
    "fewer tokens": (lambda written: written["added_tokens"].pop(), "has no token where the policy's has the added "),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_with_another_tokenizer_is_rejected_with_what_differs(policy, another, change):
    edit, words = CHANGES[change]
    other = another(edit)
    (error,) = errors(policy, path=str(other))
    assert error.startswith(f"critic.model.path={other}: it reads the policy's token ids, and its tokenizer ")
    assert words in error and "save that tokenizer there" in error


@pytest.mark.parametrize("of_base", [False, True])
def test_an_adapter_that_was_trained_with_another_tokenizer_is_rejected(policy, another, of_base, tmp_path_factory):
    other, adapter = another(swap_tokens), tmp_path_factory.mktemp("adapter")
    for file in () if of_base else other.glob("tokenizer*"):
        shutil.copy(file, adapter)
    settings = {"base_model_name_or_path": str(other if of_base else policy)}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    (error,) = errors(policy, lora_adapter_path=str(adapter))
    assert error.startswith(f"critic.model.lora_adapter_path={adapter}") and ("trained on" in error) == of_base
    assert "has 'b' where the policy's has the token 'a'" in error


def test_the_same_tokenizer_more_tokens_and_none_are_accepted(policy, another):
    def add(written: dict[str, Any]) -> None:
        written["added_tokens"].append({**written["added_tokens"][-1], "id": TOKENS, "content": "<|more|>"})

    assert errors(policy, path=str(another(lambda written: None))) == []
    other = another(add)
    assert errors(policy, path=str(other)) == []
    for file in other.glob("tokenizer*"):
        file.unlink()
    assert errors(policy, path=str(other)) == []


@pytest.mark.parametrize(("rows", "rejected"), [(TOKENS - 64, True), (TOKENS - 1, True), (TOKENS, False), (999, False)])
def test_rows_cover_the_tokens_of_the_policy_but_may_be_more_or_fewer(policy, another, rows, rejected):
    config(other := another(lambda written: None), rows)
    wrong = f"critic.model.path={other}: its embedding and head have {rows} rows, and the policy {TOKENS} tokens; "
    assert errors(policy, path=str(other)) == [f"{wrong}name another model, or resize its token embeddings"] * rejected


def test_tokens_that_the_policy_itself_has_no_row_for_are_not_missed(policy, another):
    config(other := another(lambda written: written["added_tokens"].pop()), TOKENS - 1)
    models = {"actor_rollout_ref.model": model_config(str(other)), "critic.model": model_config(str(policy))}
    check_readers(models, load_tokenizer(str(policy)), findings := Findings())
    assert findings.errors == []


@pytest.mark.parametrize("keys", [[], ["algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=true"]])
def test_the_models_of_a_run_are_those_that_it_uses(keys, policy, tmp_path):
    other = str(shutil.copytree(policy, tmp_path / "other"))
    for directory in (policy, tmp_path / "other"):
        (directory / "model.safetensors").touch()
    paths = [f"actor_rollout_ref.ref.model.path={other}", f"critic.model.path={other}"]
    run = [*keys_of_run(tmp_path), f"actor_rollout_ref.model.path={policy}", "actor_rollout_ref.rollout.n=2"]
    run += ["data.max_prompt_length=16", "data.max_response_length=16"]
    run.append("actor_rollout_ref.model.lora_rank=8")
    settings = load_ppo_config([*run, *(paths if keys else ()), *(keys or ["algorithm.adv_estimator=grpo"])])
    section = settings.actor_rollout_ref
    expected = {"actor_rollout_ref.model": section.model}
    if keys:
        expected["actor_rollout_ref.ref.model"] = replace(section.model, path=other, lora_rank=0)
        expected["critic.model"] = settings.critic.model
    assert run_models(settings, build_algorithm(settings)) == expected

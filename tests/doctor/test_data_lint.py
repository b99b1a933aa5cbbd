"""What the doctor says of rows that are loaded. Texts are bytes to the tokenizer, with no template around them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Tokenizer

from hybridrl.config import PPOConfig
from hybridrl.config.compose import SHIPPED
from hybridrl.config.findings import Finding, Findings
from hybridrl.config.load import judge
from hybridrl.data.prompts import PromptDataset, load_prompts
from hybridrl.doctor import data_lint
from hybridrl.doctor.data_lint import lint


@pytest.fixture(scope="module")
def tokenizer() -> Qwen2Tokenizer:
    special = Qwen2Tokenizer(eos_token="<|im_end|>", pad_token="<|endoftext|>")
    return special.train_new_from_iterator([""], vocab_size=258, show_progress=False)


@pytest.fixture
def config() -> PPOConfig:
    needed = ["data.train_files=rows.jsonl", "actor_rollout_ref.model.path=a/model", "data.max_prompt_length=20"]
    judged = judge(PPOConfig, needed, SHIPPED[PPOConfig], elsewhere=True).config
    assert judged is not None
    return judged


@pytest.fixture
def load(tmp_path: Path, config: PPOConfig, tokenizer: Qwen2Tokenizer) -> Any:
    def prompts(*texts: Any, **settings: Any) -> PromptDataset:
        rows = [{"prompt": text, "reward_model": {"ground_truth": "1"}} for text in texts]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = replace(config.data, **settings)
        files = [str(tmp_path / "rows.jsonl")]
        return load_prompts(files, data, tokenizer, max_samples=-1, shuffle=False, key="data.train_files")

    return prompts


def found(config: PPOConfig, prompts: PromptDataset, validation: PromptDataset | None = None) -> dict[str, Finding]:
    findings = Findings()
    lint(config, prompts, validation, findings)
    return {finding.code: finding for finding in findings.found}


def test_sound_rows_are_told_by_their_lengths_alone(config: PPOConfig, load: Any) -> None:
    said = found(config, load(*("x" * length for length in range(1, 11))))
    assert list(said) == ["data.lengths"]
    assert said["data.lengths"].severity == "information"
    # Of the lengths 1 to 10 half are at most 6 by the rank that is the next higher one.
    assert "10 prompts, in tokens 50% up to 6, 90% up to 10, 99% up to 10, 100% up to 10" in said["data.lengths"].cause


def test_prompts_that_say_nothing_are_named(config: PPOConfig, load: Any) -> None:
    said = found(config, load("a", " \n", "b", "\t"))["data.empty"]
    assert said.severity == "warning"
    assert "2 prompts say nothing, the first" in said.cause and "line 2" in said.cause


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"filter_overlong_prompts": True},
            "1 of 4 prompts (25.0%) are longer than data.max_prompt_length=20 and are dropped",
        ),
        ({"truncation": "left"}, "1 of 4 prompts (25.0%) are longer than data.max_prompt_length=20 and are cut"),
    ],
)
def test_how_many_prompts_are_dropped_or_cut_is_said(
    config: PPOConfig, load: Any, settings: dict[str, Any], told: str
) -> None:
    said = found(config, load("a", "b", "c", "x" * 21, **settings))["data.long"]
    assert (said.severity, told in said.cause) == ("warning", True)


def test_repeated_prompts_are_counted_and_the_most_frequent_shown(config: PPOConfig, load: Any) -> None:
    said = found(config, load("a", "b", "a", "a", "b", "c"))["data.duplicates"]
    assert said.severity == "information"
    assert '3 prompts repeat an earlier one ("a" is there 3 times)' in said.cause


def test_prompts_in_both_sets_are_counted(config: PPOConfig, load: Any) -> None:
    training = load("a", "b", "c")
    said = found(config, training, load("d", "b", "b"))
    assert '2 validation prompts are training prompts too, such as "b"' in said["data.overlap"].text
    assert "data.overlap" not in found(config, training, load("d"))


@pytest.mark.parametrize("text", ["[INST] b [/INST]", "[{'role': 'user'", '[ {"role" : "u'])
def test_marks_of_a_template_and_messages_as_text_are_noticed(config: PPOConfig, load: Any, text: str) -> None:
    said = found(config, load("a", text))["data.template"]
    assert "1 prompts have marks of a chat template" in said.cause and "line 2" in said.cause


def test_what_is_said_to_the_user_never_ends_a_cause_early(config: PPOConfig, load: Any) -> None:
    assert found(config, load("a; b", "a; b"))["data.duplicates"].fix == ""


def test_of_a_large_set_a_sample_is_looked_into(config: PPOConfig, load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_lint, "SAMPLE", 2)
    said = found(config, load("a", "b", "a", "b"))  # the first and the third
    assert "1 prompts (of 2 that were looked into) repeat" in said["data.duplicates"].cause
    assert "4 prompts" in said["data.lengths"].cause

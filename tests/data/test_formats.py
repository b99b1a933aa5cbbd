"""Rows in the formats of other systems."""

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
from transformers import Qwen2Tokenizer

from hybridrl.config.schema import DataConfig
from hybridrl.data.formats import to_verl_format
from hybridrl.data.prompts import Prompt, PromptDataset, load_prompts

Write = Callable[..., str]
SKYRL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2+2?"}],
    "env_class": "gsm8k",
    "reward_spec": {"method": "rule", "ground_truth": "4"},
    "extra_info": {"index": 7},
}
AREAL = {
    "prompt": "<\uff5cUser\uff5c>What is 2+2?\nUse a box.<\uff5cAssistant\uff5c><think>\n",
    "query_id": "q1",
    "task": "math",
    "solutions": ["\\boxed{4}"],
}


def load(config: DataConfig, tokenizer: Qwen2Tokenizer, file: str) -> PromptDataset:
    return load_prompts([file], config, tokenizer, max_samples=-1, shuffle=False, key="data.train_files")


def without_ids(prompt: Prompt) -> Prompt:
    return replace(prompt, ids=[])


def test_skyrl_rows_are_converted_and_logged(write, config, tokenizer, caplog):
    nameless = {name: value for name, value in SKYRL.items() if name != "data_source"}
    with caplog.at_level(logging.INFO):
        first, second = load(config, tokenizer, write(SKYRL, nameless))
    assert without_ids(first) == Prompt(0, [], SKYRL["prompt"], "openai/gsm8k", "4", {"index": 7})
    assert second.data_source == "gsm8k"
    assert "2 rows (2 in SkyRL format)" in caplog.text


def test_the_environments_that_rows_name_are_known(write, config, tokenizer):
    dataset = load(config, tokenizer, write(SKYRL, SKYRL | {"env_class": "search"}, SKYRL | {"agent_name": "mine"}))
    assert dataset.environments == {"gsm8k", "search", "mine"}
    assert dataset[1].columns["env_class"] == "search"


def test_areal_rows_are_converted_without_the_turns_of_another_chat_template(write, config, tokenizer, caplog):
    code = {
        "prompt": "Print 1.",
        "query_id": "q2",
        "task": "code",
        "input_output": '{"inputs": [""], "outputs": ["1"]}',
    }
    with caplog.at_level(logging.INFO):
        maths, program = load(replace(config, prompt_key="question"), tokenizer, write(AREAL, code))
    assert without_ids(maths) == Prompt(
        0, [], "What is 2+2?\nUse a box.", "areal/math", "\\boxed{4}", {"query_id": "q1"}
    )
    assert without_ids(program) == Prompt(1, [], "Print 1.", "areal/code", code["input_output"], {"query_id": "q2"})
    assert "2 in AReaL format" in caplog.text


@pytest.mark.parametrize(
    ("solutions", "truth"),
    [(["\\boxed{4}"], "\\boxed{4}"), ("4", "4"), (["\\boxed{4}", "four"], ["\\boxed{4}", "four"]), ([], None)],
)
def test_one_solution_is_the_ground_truth_and_several_are_a_list(solutions, truth):
    name, row = to_verl_format(AREAL | {"solutions": solutions}, "data_source")
    assert (name, row["reward_model"]["ground_truth"]) == ("AReaL", truth)


def test_a_row_in_verl_format_is_unchanged():
    row = {"prompt": "a", "reward_model": {"ground_truth": "1"}, "query_id": "q", "solutions": [], "reward_spec": {}}
    assert to_verl_format(row, "data_source") == ("verl", row)

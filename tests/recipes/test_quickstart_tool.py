"""The tool quickstart: what its demonstrations write is what a run reads and writes."""

import json
import runpy
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hybridrl.agents.environments.built_in.tools import CALCULATOR, calculate
from hybridrl.agents.environments.calls import call_parser
from hybridrl.agents.environments.dialogue import Dialogue
from hybridrl.config.load import load_ppo_config, load_sft_config
from hybridrl.data.conversations import load_conversations
from hybridrl.data.tokenizer import load_tokenizer
from hybridrl.runs.prepare import prepare
from tests.scripts import run_script

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tool")
    assert not run_script(RECIPE / "make_products.py", "--out", out)
    return out


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def demonstration(made: Path, *, calls: bool) -> list[dict[str, Any]]:
    conversations = (row["messages"] for row in rows(made / "warmup.jsonl"))
    return next(one for one in conversations if ("tool_calls" in one[2]) == calls)


def dialogue_of(made: Path) -> Dialogue:
    tokenizer = load_tokenizer(str(made / "model"))
    return Dialogue(tokenizer, [tokenizer.eos_token_id])


def test_a_third_of_the_demonstrations_call_and_the_guesses_are_wrong(made):
    kinds: Counter[str] = Counter()
    for row in rows(made / "warmup.jsonl"):
        _, question, *turns = row["messages"]
        expression = question["content"].removeprefix("What is ").removesuffix("?")
        truth = calculate(expression)
        is_right = turns[-1]["content"] == f"#### {truth}"
        if "tool_calls" in turns[0]:
            assert turns[0]["tool_calls"][0]["function"] == {
                "name": "calculator",
                "arguments": {"expression": expression},
            }
            assert turns[1]["content"] == truth and is_right
        kinds["call" if len(turns) == 3 else "right guess" if is_right else "wrong guess"] += 1
    assert kinds.total() == 400 * 32
    assert kinds["call"] / kinds.total() == pytest.approx(0.35, abs=0.02)
    assert kinds["right guess"] / kinds.total() < 0.01  # 70*40


def test_a_guess_multiplies_the_tens_and_the_ones_alone(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPE))
    guess = runpy.run_path(str(RECIPE / "make_products.py"))["guess"]
    assert [guess(problem) for problem in ((76, 48), (33, 33), (70, 40))] == [2848, 909, 2800]


def test_no_validation_problem_is_in_the_training_data(made):
    questions = {
        name: [row.get("messages", row.get("prompt"))[-1 if name != "warmup" else 1]["content"] for row in data]
        for name, data in ((name, rows(made / f"{name}.jsonl")) for name in ("train", "val", "warmup"))
    }
    assert (len(set(questions["train"])), len(set(questions["val"]))) == (2000, 200)
    assert not set(questions["val"]) & {*questions["train"], *questions["warmup"]}


@pytest.mark.parametrize("calls", [True, False])
def test_a_demonstration_has_the_tokens_that_a_run_reads_and_samples(made, calls):
    dialogue, messages = dialogue_of(made), demonstration(made, calls=calls)
    (made / "one.jsonl").write_text(json.dumps({"messages": messages}))
    config = load_sft_config(
        [f"data.train_files={made}/one.jsonl", f"model.path={made}/model"], config_name="warmup", config_dir=RECIPE
    )
    (conversation,) = load_conversations(
        config.data.train_files, config.data, dialogue.tokenizer, max_samples=-1, shuffle=False, key="data.train_files"
    )
    ids, mask = dialogue.replay(messages[1:], [CALCULATOR])  # a run's rows have no system message
    assert [conversation.ids[: len(ids)], conversation.loss_mask[: len(ids)]] == [ids, mask]


def test_the_call_of_a_demonstration_is_read_and_short(made):
    dialogue, tokenizer = dialogue_of(made), dialogue_of(made).tokenizer
    written = '<tool_call>{"name": "calculator", "arguments": {"expression": "76*48"}}</tool_call>'
    parser = call_parser("auto", "qwen2", dialogue)
    content, (call,) = parser(written, [CALCULATOR])
    assert (parser.format, content, call.name, call.arguments) == ("hermes", "", "calculator", {"expression": "76*48"})
    assert len(tokenizer(written)["input_ids"]) <= 30


def test_its_configurations_are_accepted_with_its_data(made, tmp_path, monkeypatch):
    (tmp_path / "recipes").symlink_to(RECIPE.parent)
    shutil.copytree(made, tmp_path / "outputs" / "tool" / "data")
    monkeypatch.chdir(tmp_path)
    one_device = ["trainer.n_gpus_per_node=1"]
    warmup = load_sft_config(one_device, config_name="tool_warmup", config_dir=RECIPE)
    steps = len(rows(made / "warmup.jsonl")) // warmup.data.train_batch_size
    saved = f"{warmup.trainer.default_local_dir}/global_step_{steps}/actor/huggingface"
    shutil.copytree(made / "model", saved)
    config = load_ppo_config(one_device, config_name="tool", config_dir=RECIPE)
    assert config.actor_rollout_ref.model.path == str(tmp_path / saved)
    assert not prepare(config).rejections.errors

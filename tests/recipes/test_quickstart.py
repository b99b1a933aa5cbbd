import json
import runpy
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config.load import load_ppo_config, load_sft_config
from hybridrl.data.conversations import load_conversations
from hybridrl.data.prompts import load_prompts
from hybridrl.data.tokenizer import load_tokenizer
from tests.scripts import run_script

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart"


def make(out: Path, *arguments: str) -> Path:
    assert not run_script(RECIPE / "make_data.py", "--out", out, *arguments)
    return out


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("quickstart"))


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def questions(file: Path) -> list[str]:
    return [row.get("messages", row.get("prompt"))[0]["content"] for row in rows(file)]


def test_the_seed_determines_the_files_of_the_warm_start(made, tmp_path):
    again, other = make(tmp_path / "again"), make(tmp_path / "other", "--seed", "1")
    for file in (file for file in made.rglob("*") if file.is_file()):
        assert (again / file.relative_to(made)).read_bytes() == file.read_bytes(), file
    for name, same in (("train", True), ("val", True), ("warmup", False)):
        assert (rows(other / f"{name}.jsonl") == rows(made / f"{name}.jsonl")) == same
    weights = "model/model.safetensors"
    assert (other / weights).read_bytes() != (made / weights).read_bytes()


def test_no_validation_problem_is_in_the_training_data(made):
    val = questions(made / "val.jsonl")
    assert (len(val), len(set(val))) == (200, 200)
    assert len(set(questions(made / "train.jsonl"))) == 2000
    assert not set(val) & {*questions(made / "train.jsonl"), *questions(made / "warmup.jsonl")}


def test_demonstrations_are_mostly_lazy_and_careful_ones_are_right(made):
    kinds: Counter[str] = Counter()
    for row in rows(made / "warmup.jsonl"):
        question, answer = (message["content"] for message in row["messages"])
        left, right = question.removeprefix("What is ").removesuffix("?").split("+")
        work, _, given = answer.rpartition("#### ")
        is_right = int(given) == int(left) + int(right)
        kinds["lazy" if not work else "right" if is_right else "wrong"] += 1
    assert kinds.total() == 600 * 32
    assert kinds["lazy"] / kinds.total() == pytest.approx(0.6, abs=0.02)
    # A careless solver is right too if neither of the last two digits carries.
    assert kinds["right"] / kinds.total() == pytest.approx(0.34 + 0.06 * 0.55 * 0.55, abs=0.02)


def test_a_prompt_has_19_tokens_and_a_response_35(made):
    tokenizer = load_tokenizer(str(made / "model"))
    chat = [{"role": "user", "content": "What is 767+488?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    response = tokenizer("7+8+0=15; 6+8+1=15; 7+4+1=12\n#### 1255")["input_ids"]
    assert (len(prompt), len(response)) == (19, 35)
    assert tokenizer.decode(response) == "7+8+0=15; 6+8+1=15; 7+4+1=12\n#### 1255"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_the_three_solvers_respond_as_documented():
    recipe = runpy.run_path(str(RECIPE / "make_data.py"))
    assert recipe["careful"]((767, 488)) == "7+8+0=15; 6+8+1=15; 7+4+1=12\n#### 1255"
    assert recipe["careless"]((767, 488)) == "7+8+0=15; 6+8+0=14; 7+4+0=11\n#### 1145"
    assert recipe["lazy"]((767, 488)) == "#### 1145"
    assert recipe["careful"]((123, 104)) == "3+4+0=07; 2+0+0=02; 1+1+0=02\n#### 227"


@pytest.mark.parametrize(
    ("answer", "score", "pred", "worked"),
    [
        ("7+8+0=15\n#### 1255", 1.0, "1255", 1.0),
        ("#### 1255", 1.0, "1255", 0.0),
        ("#### 1,255", 1.0, "1255", 0.0),
        ("#### 1 #### 1255", 1.0, "1255", 0.0),
        ("#### 1255 #### 1", 0.0, "1", 0.0),
        ("1255", 0.0, "", 0.0),
        ("####1255", 0.0, "", 0.0),
        ("", 0.0, "", 0.0),
    ],
)
def test_the_reward_takes_the_last_answer_after_four_hashes(answer, score, pred, worked):
    compute_score = runpy.run_path(str(RECIPE / "reward.py"))["compute_score"]
    result = compute_score(data_source="quickstart/addition", solution_str=answer, ground_truth="1255")
    assert result == {"score": score, "acc": score, "pred": pred, "worked": worked}


def test_the_two_configurations_match_each_other_and_the_data(made, tmp_path, monkeypatch):
    one_device = ["trainer.n_gpus_per_node=1"]
    (tmp_path / "recipes").symlink_to(RECIPE.parent)
    shutil.copytree(made, tmp_path / "outputs" / "quickstart" / "data")
    monkeypatch.chdir(tmp_path)
    warmup = load_sft_config(one_device, config_name="warmup", config_dir=RECIPE)
    tokenizer = load_tokenizer(warmup.model.path)
    demonstrations = load_conversations(
        warmup.data.train_files, warmup.data, tokenizer, max_samples=300, shuffle=True, key="data.train_files"
    )
    steps = len(rows(made / "warmup.jsonl")) // warmup.data.train_batch_size
    saved = f"{warmup.trainer.default_local_dir}/global_step_{steps}/actor/huggingface"
    shutil.copytree(made / "model", saved)

    train = load_ppo_config(one_device, config_name="train", config_dir=RECIPE)
    assert train.actor_rollout_ref.model.path == str(tmp_path / saved)
    files = train.data.val_files
    assert len(load_prompts(files, train.data, tokenizer, max_samples=-1, shuffle=False, key="data.val_files")) == 200
    longest = max(len(demonstration.ids) for demonstration in demonstrations)
    assert longest <= train.data.max_prompt_length + train.data.max_response_length

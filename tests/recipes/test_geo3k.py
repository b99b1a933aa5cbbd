"""Rows of a user's pictures and questions, and the configurations of recipes/geo3k."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from hybridrl.config import load_ppo_config
from hybridrl.required import required
from hybridrl.runs.prepare import prepare
from tests.scripts import run_script
from tests.vision_models import noise_picture, write_model_that_sees

RECIPE = Path(__file__).parents[2] / "recipes" / "geo3k"
QUESTIONS = [{"file": f"{number}.png", "question": f"Find x{number}.", "answer": str(number)} for number in range(12)]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., tuple[int | None, str]]:
    """Run the script on these questions, about twelve pictures; return its error."""
    for number in range(12):
        noise_picture(40 + number, 30, number).save(tmp_path / f"{number}.png")

    def run(questions: list[dict[str, Any]], name: str = "questions.jsonl") -> Any:
        with (tmp_path / name).open("w", newline="") as file:
            if name.endswith(".csv"):
                writer = csv.DictWriter(file, list(questions[0]))
                writer.writeheader()
                writer.writerows(questions)
            else:
                file.writelines(json.dumps(question) + "\n" for question in questions)
        places = ["--questions", tmp_path / name, "--pictures", tmp_path, "--out", tmp_path / "out"]
        return run_script(RECIPE / "make_data.py", *places)

    return run


@pytest.mark.parametrize("name", ["questions.jsonl", "questions.csv"])
def test_rows_have_the_form_of_verls_geo3k(make, tmp_path, name):
    assert not make(QUESTIONS, name)
    train, test = (pq.read_table(tmp_path / "out" / f"{split}.parquet").to_pylist() for split in ("train", "test"))
    assert [row["extra_info"]["answer"] for row in test] == ["0", "10"] and len(train) == 10
    assert train[0] == {
        "data_source": "hiyouga/geometry3k",
        "prompt": [
            {
                "role": "user",
                "content": "<image>Find x1. Think first, between <think> and </think>, "
                "then write the final answer in \\boxed{}.",
            }
        ],
        "images": [{"bytes": (tmp_path / "1.png").read_bytes(), "path": None}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1"},
        "extra_info": {"split": "train", "index": 0, "question": "Find x1.", "answer": "1"},
    }


def test_a_question_may_name_the_places_of_several_pictures(make, tmp_path):
    make([QUESTIONS[0], {"file": ["1.png", "2.png"], "question": "Is <image> or <image> larger?", "answer": "1"}])
    (row,) = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert row["prompt"][0]["content"].startswith("Is <image> or <image> larger? Think")
    assert [len(image["bytes"]) for image in row["images"]] == [
        (tmp_path / f"{number}.png").stat().st_size for number in (1, 2)
    ]


@pytest.mark.parametrize(
    ("questions", "error"),
    [
        ([*QUESTIONS[:2], {"file": "2.png", "question": "?"}], "question 3 has no answer"),
        ([*QUESTIONS[:2], {"file": "no.png", "question": "?", "answer": "1"}], "no.png: No such file"),
        (QUESTIONS[:1], "two questions are needed"),
    ],
)
def test_a_question_that_makes_no_row_is_named(make, questions, error):
    assert error in str(make(questions))


@pytest.mark.parametrize(
    ("name", "model", "prompts", "samples", "directory"),
    [
        ("3b_1gpu", "Qwen2.5-VL-3B-Instruct", 128, 1024, "qwen2.5-vl-3b"),
        ("8b_8gpu", "Qwen3-VL-8B-Instruct", 512, 4096, "qwen3-vl-8b"),
    ],
)
def test_a_configuration_is_valid_and_as_the_readme_has_it(name, model, prompts, samples, directory, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    local = [f"data.train_files={rows}", f"data.val_files={rows}", "trainer.n_gpus_per_node=2", "trainer.device=cpu"]
    config = load_ppo_config(local, config_name=name, config_dir=RECIPE)
    assert config.actor_rollout_ref.model.path == f"Qwen/{model}"
    assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n == samples
    assert config.trainer.default_local_dir.endswith(f"outputs/geo3k/{directory}")
    readme = (RECIPE / "README.md").read_text(encoding="utf-8")
    assert f"| `{name}` | {model} |" in readme and f"{prompts} x 8 = {samples:,}" in readme


def test_a_small_model_reads_the_rows_with_the_recipes_keys(make, tmp_path):
    make(QUESTIONS)
    model = write_model_that_sees(tmp_path / "model")
    keys = [
        *(f"data.{name}_files={tmp_path}/out/{split}.parquet" for name, split in (("train", "train"), ("val", "test"))),
        *("data.max_prompt_length=256", "data.max_response_length=64", "data.train_batch_size=4"),
        *("actor_rollout_ref.actor.ppo_mini_batch_size=2", f"actor_rollout_ref.model.path={model}"),
        *("trainer.n_gpus_per_node=2", "trainer.device=cpu", f"trainer.default_local_dir={tmp_path}/run"),
    ]
    inputs = prepare(load_ppo_config(keys, config_name="3b_1gpu", config_dir=RECIPE))
    inputs.rejections.close()
    assert required(inputs.prompts).most_pictures == 1 and len(required(inputs.validation)) == 2

"""Runs with pictures through the front door: rows as verl's own script writes them, some of them of text."""

import json
import re
import time
from io import BytesIO
from pathlib import Path
from subprocess import run
from sys import executable

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from hybridrl.agents.environments.pictures import picture_parts
from tests.integration.test_resume import compared_metrics, weights_and_moments
from tests.integration.test_run import assert_gone, driver_of, finish, metrics, start, wait_for_step
from tests.vision_models import noise_picture, write_model_that_sees

pytestmark = pytest.mark.slow

SIZES = [(), ((75, 41),), ((64, 64), (33, 120)), ((200, 30),)]  # of the pictures of four rows
STEPS = 3
SLOW = """
import time
from pathlib import Path

held = 0


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global held
    held += Path("{hold}").exists()
    while held > 28 and Path("{hold}").exists():
        time.sleep(0.2)
    return len(solution_str) % 3 / 2
"""
PROBE = "training/probe_log_prob_diff"
# Engines keep the features of pictures that they have computed, also those of earlier weights.
STALE = """
from vllm.v1.engine.core import EngineCore
EngineCore.reset_encoder_cache = lambda self: None
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """Rows with no, one and two pictures of odd sizes, in the form of verl's geo3k."""
    found = []
    for number in range(16):
        sizes = SIZES[number % len(SIZES)]
        files = [BytesIO() for _ in sizes]
        for place, (file, size) in enumerate(zip(files, sizes, strict=True)):
            noise_picture(*size, seed=10 * number + place).save(file, "PNG")
        found.append(
            {
                "data_source": "hiyouga/geometry3k",
                "prompt": [{"role": "user", "content": f"{'<image>' * len(sizes)}What is x{number}?"}],
                "images": [{"bytes": file.getvalue(), "path": None} for file in files],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(number)},
                "extra_info": {"split": "train", "index": number, "answer": str(number), "question": "What is x?"},
            }
        )
    path = tmp_path_factory.mktemp("rows") / "train.parquet"
    pq.write_table(pa.Table.from_pylist(found), path)
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("models")
    return {family: write_model_that_sees(made / family, family) for family in ("qwen3_vl", "qwen2_5_vl")}


@pytest.fixture(scope="module")
def arguments(overrides, rows, models):
    def build(directory: Path, more: dict[str, object] | None = None, family: str = "qwen3_vl") -> list[str]:
        values = {
            "data.train_files": rows,
            "data.max_prompt_length": 128,
            "actor_rollout_ref.model.path": models[family],
            "actor_rollout_ref.actor.checkpoint.save_contents": "[model,optimizer,extra]",
            "trainer.total_training_steps": STEPS,
            "trainer.save_freq": 1,
        }
        return overrides(directory, values | (more or {}))

    return build


def assert_agreement(directory: Path) -> None:
    """Assert that engine and trainer agreed in every step and sync, while updates changed the policy. An asynchronous
    step may have only tokens of earlier weights, which are not compared."""
    steps = metrics(directory)
    assert "training/log_probs_diff_max" in steps[1]
    for step in range(1, STEPS + 1):
        assert steps[step].get("training/log_probs_diff_max", 0.0) < 1e-4
        assert steps[step]["actor/grad_norm"] > 1e-3
    gaps = [values[PROBE] for values in steps.values() if PROBE in values]
    assert len(gaps) >= STEPS and max(gaps) < 1e-4


def test_engines_and_trainers_agree_on_two_ranks_and_the_merged_model_sees(arguments, tmp_path):
    more = {"actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.actor.ppo_mini_batch_size": 4}
    output = finish(start("main_ppo", arguments(tmp_path / "run", more, "qwen2_5_vl")))
    assert "12 with pictures" in output
    assert_agreement(tmp_path / "run")
    places = ["--local_dir", tmp_path / "run" / f"global_step_{STEPS}" / "actor", "--target_dir", tmp_path / "merged"]
    command = [executable, "-m", "hybridrl.model_merger", "merge", "--backend", "fsdp", *places]
    merged = run(command, capture_output=True, text=True, timeout=300)
    assert merged.returncode == 0, merged.stdout + merged.stderr
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(tmp_path / "merged")
    text = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}], add_generation_prompt=True
    )
    seen = [processor(text=[text], images=[noise_picture(60, 50, seed)], return_tensors="pt") for seed in (1, 2)]
    first, second = (model(**inputs).logits[0, -1] for inputs in seen)
    assert (first - second).abs().max() > 1e-3


@pytest.mark.parametrize(
    "more",
    [
        {"actor_rollout_ref.model.lora_rank": 4, "actor_rollout_ref.actor.optim.lr": 0.05},
        pytest.param({"actor_rollout_ref.actor.freeze_vision_tower": True}, marks=pytest.mark.drill),
        pytest.param({"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 200}, marks=pytest.mark.drill),
    ],
)
def test_they_agree_with_adapters_a_frozen_tower_and_small_micro_batches(arguments, tmp_path, more):
    finish(start("main_ppo", arguments(tmp_path, {"trainer.n_gpus_per_node": 1, "trainer.save_freq": -1} | more)))
    assert_agreement(tmp_path)


ALBUM = Path(__file__).parent / "picture_album.py"
ENVIRONMENT = {"actor_rollout_ref.rollout.multi_turn.environment": f"{ALBUM}:Album"}
AGENT = {"actor_rollout_ref.rollout.agent.path": ALBUM, "actor_rollout_ref.rollout.agent.name": "album"}


@pytest.mark.parametrize(
    ("runner", "mode"),
    [
        pytest.param(ENVIRONMENT, "sync", marks=pytest.mark.drill),
        (ENVIRONMENT, "colocate_async"),
        pytest.param(AGENT, "sync", marks=pytest.mark.drill),
    ],
)
def test_they_agree_on_the_pictures_of_environments_and_agents(arguments, tmp_path, runner, mode):
    often = write_model_that_sees(tmp_path / "often")  # the responses of a random model should end by themselves
    (often / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, *range(110, 200)]}))
    more = {
        "actor_rollout_ref.model.path": often,
        **runner,
        "actor_rollout_ref.rollout.agent.num_workers": 2,
        "actor_rollout_ref.rollout.response_length": 160,
        "actor_rollout_ref.rollout.max_model_len": 320,
        "actor_rollout_ref.rollout.multi_turn.max_assistant_response_length": 24,
        "trainer.n_gpus_per_node": 1,
        "trainer.save_freq": -1,
        "trainer.v1.trainer_mode": mode,
        "trainer.rollout_data_dir": tmp_path / "samples",
    }
    finish(start("main_ppo", arguments(tmp_path / "run", more)))
    assert_agreement(tmp_path / "run")
    records = [json.loads(line) for line in (tmp_path / "samples" / f"{STEPS}.jsonl").read_text().splitlines()]
    shown = [len(list(picture_parts(record["episode"]["messages"]))) for record in records]
    assert max(shown) == 4 and sum(map(bool, shown)) > len(shown) / 2
    images = [record["episode"].get("images", ()) for record in records]
    assert all(len(of_record) >= count for of_record, count in zip(images, shown, strict=True))
    assert all((tmp_path / "samples" / image["file"]).is_file() for of_record in images for image in of_record)


@pytest.mark.drill
def test_a_killed_run_ends_as_one_that_never_was(arguments, tmp_path):
    # Otherwise the last digits of an engine's log-probs depend on the batches in which requests happen to arrive.
    one = {"trainer.n_gpus_per_node": 1, "actor_rollout_ref.rollout.full_determinism": True}
    undisturbed = start("main_ppo", arguments(tmp_path / "unbroken", one))
    process = start("main_ppo", arguments(tmp_path / "killed", one))
    wait_for_step(process, tmp_path / "killed", 1)
    processes = psutil.Process(process.pid).children(recursive=True)
    driver_of(process).kill()
    process.communicate(timeout=60)
    assert_gone(processes)
    finish(undisturbed)
    finish(start("main_ppo", arguments(tmp_path / "killed", one)))
    assert compared_metrics(tmp_path / "killed") == compared_metrics(tmp_path / "unbroken")
    resumed, expected = (weights_and_moments(tmp_path / name, STEPS) for name in ("killed", "unbroken"))
    assert any(".visual." in name for name in expected)
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)


@pytest.mark.drill
@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_after_a_kill_in_a_rollout_no_response_is_used_for_another_picture(arguments, tmp_path, mode):
    """Of eight rows the pictures of two are exchanged before the run continues. What was sampled is kept once it has a
    score, as nearly all of a step do at the kill; up to 8 are to the rows with another picture."""
    files = [tmp_path / f"{number}.png" for number in range(8)]
    for number, file in enumerate(files):
        noise_picture(40, 60, seed=number).save(file)
    rows = [
        {"prompt": [{"role": "user", "content": "<image>What?"}], "images": [str(file)], "ground_truth": str(number)}
        for number, file in enumerate(files)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    hold = tmp_path / "hold"
    (tmp_path / "reward.py").write_text(SLOW.format(hold=hold))
    more = {
        "data.train_files": tmp_path / "rows.jsonl",
        "data.ground_truth_key": "ground_truth",
        "data.shuffle": False,
        "reward.custom_reward_function.path": tmp_path / "reward.py",
        "trainer.n_gpus_per_node": 1,
        "trainer.v1.trainer_mode": mode,
    }
    process = start("main_ppo", arguments(tmp_path / "run", more))
    wait_for_step(process, tmp_path / "run", 1)
    hold.touch()
    spool, sizes = tmp_path / "run" / "spool" / "step_2", [0]
    while not sizes[-1] or len({*sizes[-4:]}) > 1:  # until nothing has come for three seconds
        time.sleep(1)
        assert process.poll() is None
        sizes.append(spool.stat().st_size if spool.exists() else 0)
    driver_of(process).kill()
    process.communicate(timeout=60)
    other = files[0].read_bytes()
    files[0].write_bytes(files[5].read_bytes())
    files[5].write_bytes(other)
    hold.unlink()
    output = finish(start("main_ppo", arguments(tmp_path / "run", more)))
    found = re.search(r"(\d+) responses of the (\d+) that were spooled are used again", output)
    assert found, output
    used, spooled = map(int, found.groups())
    assert used < spooled <= used + 8, output
    assert_agreement(tmp_path / "run")


def test_features_of_an_earlier_tower_stop_the_run_in_the_first_sync_after_an_update(arguments, tmp_path):
    (tmp_path / "stale.py").write_text(STALE)
    more = {"trainer.n_gpus_per_node": 1, "actor_rollout_ref.model.external_lib": f"[{tmp_path}/stale.py]"}
    output = finish(start("main_ppo", arguments(tmp_path / "run", more)), status=1)
    assert "differs from the trainer in the log-probs of a fixed sequence" in output
    assert max(metrics(tmp_path / "run")) == 1

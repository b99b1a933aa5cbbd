import json
from pathlib import Path

import pytest
from sizing import write_models

from hybridrl.config import PPOConfig, load_ppo_config
from hybridrl.config.findings import Findings
from hybridrl.config.load import resolve_config
from hybridrl.data.prompts import load_prompts
from hybridrl.data.tokenizer import load_tokenizer
from hybridrl.doctor.memory import PlannedRun, make_plans
from hybridrl.doctor.memory_sizes import read_models
from hybridrl.doctor.start import choose_recomputation
from hybridrl.required import required
from tests.scripts import run_script

SCRIPT = Path(__file__).parents[2] / "recipes" / "gsm8k" / "make_data.py"


def test_local_problems_become_prompts_for_the_random_model(tmp_path):
    problem = {"question": "Ann has 600 pens and buys 634. How many?", "answer": "600+634=1234\n#### 1,234"}
    for split in ("train", "test"):
        (tmp_path / f"gsm8k_{split}.jsonl").write_text(json.dumps(problem) + "\n")
    model = tmp_path / "model"
    arguments = ["--out", tmp_path / "out", "--local_dir", tmp_path, "--random_model", model]
    assert not run_script(SCRIPT, *arguments)

    files = [
        f"data.{name}_files={tmp_path}/out/{split}.parquet" for name, split in (("train", "train"), ("val", "test"))
    ]
    config = load_ppo_config([*files, f"actor_rollout_ref.model.path={model}"]).data
    tokenizer = load_tokenizer(str(model))
    (prompt,) = load_prompts(
        config.train_files, config, tokenizer, max_samples=-1, shuffle=True, key="data.train_files"
    )
    assert prompt.ground_truth == "1234"
    assert prompt.data_source == "openai/gsm8k"
    assert prompt.extra_info == {"split": "train", "index": 0, **problem}
    text = tokenizer.decode(prompt.ids)
    assert text.startswith(f"<|im_start|>user\n{problem['question']}")
    assert '"####"' in text


@pytest.mark.parametrize(
    ("name", "model", "prompts", "samples", "directory"),
    [
        ("0.5b_1gpu", "0.5B", 128, 1024, "qwen2.5-0.5b"),
        ("1.5b_1gpu", "1.5B", 128, 1024, "qwen2.5-1.5b"),
        ("7b_8gpu", "7B", 512, 4096, "qwen2.5-7b"),
        ("calculator_1.5b_1gpu", "1.5B", 128, 1024, "calculator-1.5b"),
        ("calculator_7b_8gpu", "7B", 512, 4096, "calculator-7b"),
    ],
)
def test_a_configuration_is_valid_and_as_the_readme_has_it(name, model, prompts, samples, directory, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    # Two devices: without GPUs an engine cannot use fewer than all of them.
    local = [f"data.train_files={rows}", f"data.val_files={rows}", "trainer.n_gpus_per_node=2", "trainer.device=cpu"]
    config = load_ppo_config(local, config_name=name, config_dir=SCRIPT.parent)
    rollout = config.actor_rollout_ref.rollout
    assert config.actor_rollout_ref.model.path == f"Qwen/Qwen2.5-{model}-Instruct"
    assert (config.data.train_batch_size, config.data.train_batch_size * rollout.n) == (prompts, samples)
    assert config.trainer.default_local_dir.endswith(f"outputs/gsm8k/{directory}")
    assert bool(rollout.multi_turn.tools) == name.startswith("calculator")
    readme = SCRIPT.with_name("README.md").read_text(encoding="utf-8")
    assert f"| `{name}` | Qwen2.5-{model}-Instruct" in readme
    assert f"{prompts} x 8 = {samples:,}" in readme


def offline_config(name: str, size: str, root: Path) -> PPOConfig:
    write_models(root)
    rows = [f"data.{part}_files={root / 'rows.jsonl'}" for part in ("train", "val")]
    keys = ["trainer.device=cuda", *rows, f"actor_rollout_ref.model.path={root / size}"]
    return required(resolve_config(PPOConfig, keys, name, SCRIPT.parent, offline=True).config)


@pytest.mark.parametrize(
    ("name", "size", "gigabytes"), [("0.5b_1gpu", "0.5B", 24), ("1.5b_1gpu", "1.5B", 48), ("7b_8gpu", "7B", 80)]
)
def test_the_memory_in_the_readme_is_the_doctor_s_estimate(name, size, gigabytes, tmp_path):
    config = offline_config(name, size, tmp_path)
    gpu, host = make_plans(PlannedRun(config, read_models(config), gigabytes * 10**9))
    rollout, update = (gpu.needs[phase].total() / 1e9 for phase in ("rollout", "policy update"))
    assert gpu.fullest == "rollout" and rollout < gigabytes
    line = f"| `{name}` | {rollout:.1f} of {gigabytes} | {update:.1f} | {host.peak / 1e9:.1f} |"
    assert line in SCRIPT.with_name("README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("size", "tokens"), [("0.5B", 16384), ("1.5B", 8192)])
def test_on_a_gpu_of_80_gb_small_models_recompute_nothing(size, tokens, tmp_path):
    config = offline_config(f"{size.lower()}_1gpu", size, tmp_path)
    choose_recomputation(PlannedRun(config, read_models(config), 80 * 10**9), Findings())
    section = config.actor_rollout_ref
    assert section.model.enable_gradient_checkpointing is False and section.actor.fsdp_config.compile_layers
    assert section.actor.ppo_max_token_len_per_gpu == tokens

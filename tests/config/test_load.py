import json
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config import load_sft_config
from hybridrl.config.checks import resolve_ppo
from hybridrl.config.checks.training import Machine
from hybridrl.config.compose import as_yaml, save_config
from hybridrl.config.findings import Findings

ROLLOUT = "actor_rollout_ref.rollout"


def at(config: object, key: str) -> Any:
    for name in key.split("."):
        config = vars(config)[name]
    return config


def test_a_value_becomes_what_its_key_holds(load):
    wanted = {
        "data.train_batch_size=8": 8,
        "data.max_prompt_length=1e2": 100,
        "data.max_response_length='8'": 8,
        "actor_rollout_ref.actor.optim.lr=1e-4": 1e-4,
        "actor_rollout_ref.actor.optim.muon_lr=1": 1.0,
        "actor_rollout_ref.actor.grad_clip=inf": float("inf"),
        "data.shuffle=False": False,
        "data.filter_overlong_prompts='yes'": True,
        "trainer.project_name=7": "7",
        "trainer.experiment_name='a=b'": "a=b",
        "trainer.logger=console": ["console"],
        "trainer.rollout_data_dir=": None,
        "trainer.validation_data_dir='~/samples'": str(Path.home() / "samples"),
        "data.train_files=[train.jsonl,train.jsonl]": ["train.jsonl", "train.jsonl"],
        "data.val_files=null": [],
        "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16": "bfloat16",
        "data.apply_chat_template_kwargs={enable_thinking: false}": {"enable_thinking": False},
    }
    config = load(*wanted).config
    found = {override: at(config, override.split("=")[0]) for override in wanted}
    assert found == wanted
    assert [type(value) for value in found.values()] == [type(value) for value in wanted.values()]


def test_free_mappings_take_keys_of_their_own(load):
    config = load(
        "+data.apply_chat_template_kwargs.enable_thinking=false",
        "ray_kwargs.ray_init.runtime_env.py_executable=python3",
        "actor_rollout_ref.rollout.engine_kwargs.vllm={kv_cache_dtype: fp8}",
    ).config
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False}
    assert config.ray_kwargs.ray_init == {"runtime_env": {"py_executable": "python3"}}
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm == {"kv_cache_dtype": "fp8"}


def test_nested_values_of_a_section_are_merged_into_it(load):
    chosen = load(
        ROLLOUT + ".val_kwargs={n: 4, do_sample: true, temperature: 0.5}"
    ).config.actor_rollout_ref.rollout.val_kwargs
    assert (chosen.n, chosen.temperature, chosen.top_p) == (4, 0.5, 1.0)


def test_an_environment_variable_gives_a_number(load, monkeypatch):
    monkeypatch.setenv("PROMPTS", "12")
    assert load("data.train_batch_size=${oc.env:PROMPTS}").config.data.train_batch_size == 12


def test_seeds_and_lengths_follow_the_keys_they_stand_for(load):
    config = load("trainer.seed=7", "data.max_prompt_length=100", "data.max_response_length=30").config
    assert (config.data.seed, config.actor_rollout_ref.rollout.seed) == (7, 7)
    assert config.actor_rollout_ref.rollout.max_model_len == 130
    assert config.actor_rollout_ref.actor.loss_scale_factor == 30.0


def test_a_clip_range_that_is_set_on_one_side_keeps_the_other(load):
    actor = load("actor_rollout_ref.actor.clip_ratio=0.1", "actor_rollout_ref.actor.clip_ratio_high=0.3").config
    assert actor.actor_rollout_ref.actor.clip_ratio_low == 0.1
    assert actor.actor_rollout_ref.actor.clip_ratio_high == 0.3


@pytest.mark.parametrize(
    ("machine", "device", "devices", "dtype"),
    [
        (Machine(gpus=0, cores=1, memory_bytes=8 << 30), "cpu", 1, "float32"),
        (Machine(gpus=0, cores=64, memory_bytes=8 << 30), "cpu", 2, "float32"),
        (Machine(gpus=8, cores=64, memory_bytes=8 << 30), "cuda", 8, "bfloat16"),
    ],
)
def test_what_is_left_open_follows_the_machine(load, machine, device, devices, dtype):
    config = load().config
    config.trainer.device, config.trainer.n_gpus_per_node = "auto", None
    config.actor_rollout_ref.rollout.dtype = config.actor_rollout_ref.actor.fsdp_config.dtype = None
    config.actor_rollout_ref.actor.fsdp_config.fsdp_size = -1
    resolve_ppo(config, Findings(), machine)
    assert (config.trainer.device, config.trainer.n_gpus_per_node) == (device, devices)
    assert config.actor_rollout_ref.actor.fsdp_config.fsdp_size == devices
    assert config.actor_rollout_ref.rollout.dtype == config.actor_rollout_ref.actor.fsdp_config.dtype == dtype


def test_the_saved_configuration_loads_again(load, tmp_path):
    config = load("trainer.experiment_name='1e-6'", ROLLOUT + ".n=4").config
    save_config(as_yaml(config), tmp_path / "config.yaml")
    again = load(config_dir=tmp_path, config_name="config").config
    assert again == config
    assert as_yaml(again) == as_yaml(config)


def test_an_own_file_changes_what_it_names_and_the_command_has_the_last_word(load, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\n"
        "data:\n  train_batch_size: 8\n  max_prompt_length: 16\n"
        "actor_rollout_ref:\n  rollout: {n: 4}\n"
    )
    config = load("data.max_prompt_length=32", config_dir=tmp_path, config_name="mine").config
    assert (config.data.train_batch_size, config.data.max_prompt_length) == (8, 32)
    assert config.actor_rollout_ref.rollout.n == 4
    assert config.data.max_response_length == 512


def test_an_own_file_may_stand_for_a_section(load, tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\n")
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "dr_grpo.yaml").write_text(
        "defaults: [default, _self_]\nnorm_adv_by_std_in_grpo: false\n"
    )
    config = load("algorithm=dr_grpo", config_dir=tmp_path, config_name="mine").config
    assert not config.algorithm.norm_adv_by_std_in_grpo


@pytest.mark.parametrize("old", ["custom_reward_function", "reward_model.reward_fn", "reward.custom_reward_function"])
def test_all_spellings_of_the_reward_function_mean_the_same(load, tmp_path, old):
    (tmp_path / "r.py").touch()
    loaded = load(f"{old}.path=r.py", f"{old}.name=f", f"+{old}.reward_kwargs.bonus=2")
    custom = loaded.config.reward.custom_reward_function
    assert (custom.path, custom.name, custom.reward_kwargs) == ("r.py", "f", {"bonus": 2})
    moved = [f"{old}.path is now reward.custom_reward_function.path"] if not old.startswith("reward.") else []
    assert [note for note in loaded.notes if "custom_reward_function.path" in note] == moved


def test_what_verls_manager_batch_hands_to_the_function_is_handed_to_it_here(load):
    reward = load("+reward_model.reward_kwargs.bonus=2", "+reward_model.reward_kwargs.max_resp_len=99").config.reward
    assert reward.custom_reward_function.reward_kwargs == {"bonus": 2}
    assert reward.reward_kwargs.max_resp_len == 99


def test_other_old_names_are_moved(load):
    config = load("reward_model.reward_manager=naive", "rollout.val_kwargs.n=2", "reward_model.num_workers=3").config
    assert config.reward.reward_manager.name == "naive"
    assert config.actor_rollout_ref.rollout.val_kwargs.n == 2
    assert config.reward.num_workers == 3


def test_supervised_fine_tuning_has_a_configuration_of_its_own(needed):
    config = load_sft_config(["data.train_files=train.jsonl", "model.path=model", "engine.fsdp_config.fsdp_size=1"])
    assert (config.optim.lr, config.optim.lr_scheduler_type, config.trainer.total_epochs) == (1e-5, "cosine", 1)
    assert config.engine.fsdp_config.dtype == "float32"


def test_a_model_whose_positions_are_stretched_may_be_longer_than_its_file_says(load, tmp_path):
    config = {"max_position_embeddings": 1024, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert load("data.max_prompt_length=2048").config.actor_rollout_ref.rollout.max_model_len == 2560


def test_false_stands_for_never_where_a_number_of_steps_is_wanted(load):
    trainer = load("trainer.test_freq=false", "trainer.save_freq=False").config.trainer
    assert (trainer.test_freq, trainer.save_freq) == (-1, -1)

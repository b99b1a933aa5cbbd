"""The JSON Schema of configuration files, which an editor checks them with."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from hybridrl import project_file
from hybridrl.config import PPOConfig, SFTConfig, load_sft_config
from hybridrl.config.compose import CONF, as_yaml
from hybridrl.config.json_schema import json_schema
from hybridrl.config.values import value_keys
from tests.config.conftest import Load

RECIPES = sorted(Path(project_file("recipes")).absolute().glob("**/*.yaml"))


def validator(schema: type) -> Draft202012Validator:
    written = json_schema(schema)
    Draft202012Validator.check_schema(written)
    return Draft202012Validator(written)


PPO, SFT = validator(PPOConfig), validator(SFTConfig)


def faults(text: str, of: Draft202012Validator = PPO) -> list[str]:
    return [error.json_path.removeprefix("$.") for error in of.iter_errors(yaml.safe_load(text))]


def key(name: str, of: Draft202012Validator = PPO) -> dict[str, Any]:
    inner = of.schema
    for part in name.split("."):
        inner = inner["properties"][part]
    return inner


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_the_recipes_are_valid(file: Path) -> None:
    text = file.read_text()
    assert faults(text, SFT if "defaults: [sft_trainer" in text else PPO) == []


@pytest.mark.parametrize("file", ["ppo_trainer", "sft_trainer"])
def test_the_shipped_files_are_valid(file: str) -> None:
    assert faults((CONF / f"{file}.yaml").read_text(), PPO if file == "ppo_trainer" else SFT) == []


def test_the_stored_configuration_of_a_run_is_valid(load: Load, needed: list[str]) -> None:
    assert faults(as_yaml(load("algorithm.adv_estimator=grpo", "trainer.on_diagnosis={not-finite: stop}").config)) == []
    assert faults(as_yaml(load_sft_config(["data.train_files=train.jsonl", "model.path=model"])), SFT) == []


def test_every_key_is_described() -> None:
    for of, schema in ((PPO, PPOConfig), (SFT, SFTConfig)):
        entries = {name: key(name, of) for name in value_keys(schema)}
        assert [name for name, entry in entries.items() if not entry.get("description")] == []
        unset = {name for name, entry in entries.items() if "default" not in entry}
        assert {name.rpartition(".")[2] for name in unset} <= {"train_files", "path", "tokenizer_path"}


def test_an_entry_has_type_default_limits_and_names() -> None:
    share = key("actor_rollout_ref.rollout.gpu_memory_utilization")
    assert (share["type"], share["default"]) == (["number", "string"], 0.5)
    assert (share["exclusiveMinimum"], share["maximum"]) == (0, 1)
    assert {"enum": ["fsdp", "fsdp2"]} in key("critic.strategy")["anyOf"]
    assert "grpo" in key("algorithm.adv_estimator")["anyOf"][0]["enum"]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("trainr: {total_epochs: 3}", "$"),
        ("trainer: {total_epoch: 3}", "trainer"),
        ("actor_rollout_ref: {actor: {optim: {learning_rate: 1.0e-6}}}", "actor_rollout_ref.actor.optim"),
        ("trainer: {total_epochs: many}", "trainer.total_epochs"),
        ("trainer: {total_epochs: 0}", "trainer.total_epochs"),
        ("trainer: {total_epochs: 1.5}", "trainer.total_epochs"),
        ("data: {shuffle: sometimes}", "data.shuffle"),
        ("data: {truncation: top}", "data.truncation"),
        ("data: {train_batch_size: [1]}", "data.train_batch_size"),
        ("data: 5", "data"),
        ("actor_rollout_ref: {actor: {checkpoint: {save_contents: [modle]}}}", "...save_contents"),
    ],
)
def test_a_typo_a_wrong_type_and_a_value_out_of_range_are_errors(text: str, place: str) -> None:
    assert [path.endswith(place.removeprefix("...")) for path in faults(text)] == [True]


@pytest.mark.parametrize(
    "text",
    [
        "defaults: [ppo_trainer, _self_]",
        "hydra: {run: {dir: .}}",
        "own: {anything: [1, {b: 2}]}",
        "data: {train_batch_size: '${own.size}', truncation: '${own.side}', shuffle: '${own.mix}'}",
        "data: {train_files: rows.jsonl, val_files: null, apply_chat_template_kwargs: {enable_thinking: false}}",
        "actor_rollout_ref: {actor: {optim: {lr: 1e-6, optimizer: adamw, betas: [0.9, 0.95]}}}",  # YAML 1.1: text
        "trainer: {test_freq: false, logger: console}",
        "algorithm: {adv_estimator: mine.py:advantage}",
    ],
)
def test_forms_that_the_loader_reads_are_valid(text: str) -> None:
    assert faults(text) == []


def test_keys_of_verl_are_valid_and_deprecated() -> None:
    text = """
    actor_rollout_ref:
      model: {use_shm: false, fused_kernel_options: {impl_backend: torch}}
      actor:
        _target_: verl.workers.config.FSDPActorConfig
        strategy: megatron
        optim: {clip_grad: 1.0, warmup_style: null, total_training_steps: -1}
        megatron: {pipeline_model_parallel_size: 2}
      rollout: {mode: async, trace: {backend: null}}
    critic: {model: {fsdp_config: {fsdp_size: -1}}}
    reward_model: {reward_manager: naive, sandbox_fusion: {url: null}}
    reward: {reward_kwargs: {any: 1}}
    custom_reward_function: {path: null, name: compute_score}
    trainer: {balance_batch: true, logger: [console, wandb]}
    global_profiler: {steps: null}
    """
    assert faults(text) == []
    old = key("actor_rollout_ref.actor.optim.clip_grad")
    assert old["deprecated"] and old["description"] == "is now actor_rollout_ref.actor.grad_clip"
    assert faults("actor_rollout_ref: {actor: {optim: {clip_grad: much}}}") == [
        "actor_rollout_ref.actor.optim.clip_grad"
    ]

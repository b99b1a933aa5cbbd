"""Real parts, shared by a module: one Ray, one group of workers, one tiny model."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from hybridrl.config import load_ppo_config
from hybridrl.core.training.worker_group import RankPlan, TrainWorkers
from hybridrl.runs.ppo import probe_ids, start_devices
from hybridrl.runs.settings import build_algorithm, build_policy_plan, ppo_worker_config
from hybridrl.runs.setup import start_session
from hybridrl.runtime.environment import fork_server
from tests.integration.answers import PROMPT

ROOT = Path(__file__).parents[2]
ENGINE = os.environ.get("HYBRIDRL_TEST_ENGINE", "vllm")  # of scripts/test.sh --sglang: the same proofs


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """The quickstart's data and its untrained model: model/, warmup.jsonl, train.jsonl, val.jsonl."""
    directory = tmp_path_factory.mktemp("tiny")
    script = ROOT / "recipes" / "quickstart" / "make_data.py"
    subprocess.run([sys.executable, script, "--out", directory], check=True, cwd=ROOT)
    return directory


@pytest.fixture(scope="session")
def mixture(tiny, tmp_path_factory) -> Path:
    """A mixture of eight experts with the quickstart's tokenizer."""
    path, tokenizer = tmp_path_factory.mktemp("mixture"), AutoTokenizer.from_pretrained(tiny / "model")
    settings = Qwen3MoeConfig(
        vocab_size=AutoConfig.from_pretrained(tiny / "model").vocab_size,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(settings).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def overrides(tiny) -> Callable[..., list[str]]:
    """A small run on two slots, as key=value; further keys given as a dict win."""

    def build(directory: Path, more: dict[str, object] | None = None) -> list[str]:
        values: dict[str, object] = {
            "data.train_files": tiny / "train.jsonl",
            "data.train_batch_size": 8,
            "data.max_prompt_length": 32,
            "data.max_response_length": 24,
            "actor_rollout_ref.model.path": tiny / "model",
            "actor_rollout_ref.rollout.n": 4,
            "actor_rollout_ref.rollout.name": ENGINE,
            "algorithm.adv_estimator": "grpo",
            "actor_rollout_ref.actor.checkpoint.save_contents": "[model,optimizer,extra,hf_model]",
            "actor_rollout_ref.rollout.max_num_seqs": 32,
            "actor_rollout_ref.actor.optim.lr": 1e-2,
            "reward.custom_reward_function.path": ROOT / "tests" / "integration" / "length_reward.py",
            "reward.num_workers": 1,
            "trainer.n_gpus_per_node": 2,
            "trainer.default_local_dir": directory,
            "trainer.logger": "[console]",
            "trainer.total_training_steps": 2,
        }
        return [f"{key}={value}" for key, value in (values | (more or {})).items()]

    return build


@pytest.fixture(scope="module")
def config(overrides, tmp_path_factory):
    longer = {"actor_rollout_ref.rollout.max_model_len": 448}  # for episodes of several turns
    return load_ppo_config(overrides(tmp_path_factory.mktemp("run"), longer))


@pytest.fixture(scope="module")
def parts(config, session, tmp_path_factory):
    """Real engines and training ranks on the same devices."""
    logs = tmp_path_factory.mktemp("logs")
    worker = ppo_worker_config(config, build_algorithm(config), logs, steps=10)
    workers, engine = start_devices(config, session, worker, logs, probe_ids(PROMPT))
    return engine, TrainWorkers(workers, RankPlan(worker.models, build_policy_plan(config)), "float32", 120)


@pytest.fixture(scope="session")
def forks(overrides, tmp_path_factory):
    """Where the workers of all modules come from."""
    config = load_ppo_config(overrides(tmp_path_factory.mktemp("forks")))
    with fork_server(config.trainer.device, {}, config.devices_per_machine, engine=ENGINE) as server:
        yield server


@pytest.fixture(scope="module")
def session(config, forks):
    session = start_session(config.trainer, config.ray_kwargs.ray_init, forks)
    yield session
    session.close()

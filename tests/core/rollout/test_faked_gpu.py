"""The engine's configuration as on H100s, built by the installed vLLM."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen2Config

SCRIPT = Path(__file__).with_name("on_faked_gpu.py")
ROLLOUT = "actor_rollout_ref.rollout"
RUNS = {
    "plain": [],
    "float32": [f"{ROLLOUT}.dtype=float32", f"{ROLLOUT}.enforce_eager=true", f"{ROLLOUT}.free_cache_engine=false"],
    "chosen": [f"+{ROLLOUT}.engine_kwargs.vllm.attention_backend=TRITON_ATTN"],
    "adapter": ["actor_rollout_ref.model.lora_rank=12", f"{ROLLOUT}.tensor_model_parallel_size=2"],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """vLLM's configuration for each run, made in one process since its import takes long."""
    model = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 128, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 320}
    config = Qwen2Config(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048, **sizes)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(model)
    save_file({"lm_head.weight": torch.zeros(1)}, model / "model.safetensors")
    command = [sys.executable, SCRIPT, model, json.dumps(list(RUNS.values()))]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(zip(RUNS, json.loads(done.stdout.splitlines()[-1]), strict=True))


def test_an_engine_on_a_gpu_sleeps_captures_graphs_and_takes_its_weights_from_the_trainer(made):
    assert made["plain"] == {
        "device": "cuda",
        "worker": "vllm.v1.worker.gpu_worker.Worker",
        "executor": "uni",
        "tensor_parallel": 1,
        "extension": "hybridrl.core.rollout.vllm.worker.EngineProcess",
        "dtype": "torch.bfloat16",
        "sleeps": True,
        "log_probs": "processed_logprobs",
        "weights_by": "hybridrl",
        "load_format": "dummy",
        "chunked": True,
        "tokens": 8192,
        "cache_share": 0.5,
        "cache_bytes": None,
        "graphs": "FULL_AND_PIECEWISE",
        "rank": None,
        "attention": None,
    }


def test_float32_without_graphs_and_without_sleep(made):
    engine = made["float32"]
    assert (engine["dtype"], engine["graphs"], engine["sleeps"]) == ("torch.float32", "NONE", False)


def test_the_attention_kernel_can_be_chosen(made):
    assert made["chosen"]["attention"] == "TRITON_ATTN"


def test_an_adapter_gets_the_next_rank_that_vllm_supports_on_every_gpu_of_its_engine(made):
    engine = made["adapter"]
    assert (engine["rank"], engine["tensor_parallel"], engine["executor"]) == (16, 2, "mp")

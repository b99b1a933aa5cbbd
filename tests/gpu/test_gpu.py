"""What only a GPU can show: CUDA IPC, sleep that frees memory, bfloat16. Skipped without one; run with `-m gpu`."""

import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hybridrl.device import release_cached_memory
from hybridrl.weights.handles import SharedBuffer, open_buffer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

PROCESSES = multiprocessing.get_context("spawn")
ROOT = Path(__file__).parents[2]


def run(tmp_path: Path, *more: str) -> list[dict]:
    make_data = ROOT / "recipes" / "quickstart" / "make_data.py"
    subprocess.run([sys.executable, make_data, "--out", tmp_path / "data"], check=True, cwd=ROOT)
    arguments = [
        f"data.train_files={tmp_path}/data/train.jsonl",
        "data.train_batch_size=16",
        "data.max_prompt_length=32",
        "data.max_response_length=32",
        f"actor_rollout_ref.model.path={tmp_path}/data/model",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.2",
        f"reward.custom_reward_function.path={ROOT}/tests/integration/length_reward.py",
        f"trainer.default_local_dir={tmp_path}/run",
        "trainer.device=cuda",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=3",
        *more,
    ]
    done = subprocess.run([sys.executable, "-m", "hybridrl.main_ppo", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def test_weights_pass_by_cuda_ipc_and_agree_in_bfloat16(tmp_path):
    last = run(tmp_path)[-1]
    assert last["training/rollout_probs_diff_mean"] < 0.01
    assert last["actor/grad_norm"] > 0


def test_float32_agrees_to_1e_3_with_everything_offloaded(tmp_path):
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    more = [f"{fsdp}.dtype=fp32", "actor_rollout_ref.rollout.dtype=fp32"]
    last = run(tmp_path, *more, f"{fsdp}.param_offload=true", f"{fsdp}.optimizer_offload=true")[-1]
    assert last["training/log_probs_diff_max"] < 1e-3


def test_float32_agrees_to_1e_3_with_parameters_gradients_and_moments_in_host_memory(tmp_path):
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    more = [f"{fsdp}.dtype=fp32", "actor_rollout_ref.rollout.dtype=fp32", f"{fsdp}.offload_policy=true"]
    last = run(tmp_path, *more)[-1]
    assert last["training/log_probs_diff_max"] < 1e-3
    assert last["actor/grad_norm"] > 0


def test_the_memory_of_a_bucket_whose_reader_was_killed_is_freed():
    device, size = torch.device("cuda", 0), 64 << 20
    before, buffer = torch.cuda.memory_allocated(), SharedBuffer(size, device)
    reader = PROCESSES.Process(target=read_until_killed, args=(buffer.handle, opened := PROCESSES.Event()))
    reader.start()
    assert opened.wait(120)
    reader.kill()
    reader.join()
    buffer.close(reader_died=True)
    release_cached_memory("cuda")
    assert torch.cuda.memory_allocated() == before


def read_until_killed(handle, opened):
    kept = open_buffer(handle, torch.device("cuda", 0))
    assert not kept.is_cpu
    opened.set()
    time.sleep(600)


def test_ppo_with_a_critic_learns_through_the_same_switch(tmp_path):
    offload = [f"critic.fsdp.{what}_offload=true" for what in ("param", "optimizer")]
    last = run(tmp_path, "algorithm.adv_estimator=gae", *offload)[-1]
    assert last["critic/grad_norm"] > 0
    assert last["training/rollout_probs_diff_mean"] < 0.01

"""What only a GPU can show: CUDA IPC, sleep that frees memory, bfloat16. Skipped without one; run with `-m gpu`."""

import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from hybridrl.core.batch import Batch
from hybridrl.core.device import host_buffer, release_cached_memory
from hybridrl.core.training import attention
from hybridrl.core.training.model import LanguageModel
from hybridrl.core.training.packing import pack_rows
from hybridrl.core.weights.buckets import SharedBuffer, open_buffer
from hybridrl.required import required

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

PROCESSES = multiprocessing.get_context("spawn")
ROOT = Path(__file__).parents[2]
DEVICE = torch.device("cuda", 0)


def make_data(directory: Path) -> None:
    script = ROOT / "recipes" / "quickstart" / "make_data.py"
    subprocess.run([sys.executable, script, "--out", directory], check=True, cwd=ROOT)


@pytest.fixture(scope="module")
def grouped(tmp_path_factory) -> str:
    """Two layers of Qwen2.5-0.5B, whose 14 heads share two keys, with the quickstart's tokenizer."""
    directory = tmp_path_factory.mktemp("grouped")
    make_data(directory / "data")
    tokenizer = AutoTokenizer.from_pretrained(directory / "data" / "model")
    shape = Qwen2Config(
        vocab_size=512,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=2,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(shape).bfloat16().save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    return str(directory / "model")


def gradients(path: str, rows: Batch, dtype: torch.dtype, *, padded: bool) -> dict[str, torch.Tensor]:
    """Of a weighted sum of the rows' log-probs by parameter, and the log-probs."""
    loaded = Qwen2ForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention.NAME)
    model = LanguageModel(loaded).to(DEVICE).train()
    log_probs = model(pack_rows(rows, padded).to(DEVICE), 1.0).log_probs
    (log_probs * torch.linspace(-1, 1, len(log_probs), device=DEVICE)).sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: required(value).float() for name, value in (found | {"log-probs": log_probs.detach()}).items()}


def run(tmp_path: Path, *more: str) -> list[dict]:
    make_data(tmp_path / "data")
    arguments = [
        f"data.train_files={tmp_path}/data/train.jsonl",
        "data.train_batch_size=16",
        "data.max_prompt_length=32",
        "data.max_response_length=32",
        f"actor_rollout_ref.model.path={tmp_path}/data/model",
        "algorithm.adv_estimator=grpo",
        "trainer.logger=[console]",
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
    while not opened.wait(1):
        assert reader.is_alive(), "its traceback is above"
    reader.kill()
    reader.join()
    buffer.close(reader_died=True)
    release_cached_memory("cuda")
    assert torch.cuda.memory_allocated() == before


def test_registered_host_memory_can_be_freed_and_its_place_used_again():
    values = torch.arange(1 << 20, dtype=torch.uint8, device=DEVICE)
    for _ in range(8):
        buffers = [host_buffer(size, "cuda") for size in (1, 1000, 70_000, 2_300_000, 64 << 20)]
        assert all(buffer.is_pinned() for buffer in buffers)
        buffers[-1][: len(values)].copy_(values, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(buffers[-1][: len(values)], values.cpu())


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


def test_heads_that_share_keys_give_packed_rows_the_gradient_of_padded_ones_in_float32(grouped, make_batch):
    rows = make_batch([100, 1, 37, 250], prompts=[20, 5, 1, 3])
    packed = gradients(grouped, rows, torch.bfloat16, padded=False)
    reference = gradients(grouped, rows, torch.float32, padded=True)
    errors = {name: float((value - reference[name]).norm() / reference[name].norm()) for name, value in packed.items()}
    assert max(errors.values()) < 0.1, errors


def test_a_model_whose_heads_share_keys_is_synced_sampled_from_and_trained(tmp_path, grouped):
    last = run(tmp_path, f"actor_rollout_ref.model.path={grouped}")[-1]
    assert last["training/rollout_probs_diff_mean"] < 0.01
    assert last["actor/grad_norm"] > 0

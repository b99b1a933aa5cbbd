"""What vLLM must be given from outside: environment variables, and the size of its cache on CPU. Does not import it."""

import math
import os

import psutil
import torch
from transformers import AutoConfig

from hybridrl.config.files import resolve_model
from hybridrl.config.schema import ModelConfig, RolloutConfig
from hybridrl.core.rollout.engine import EngineEntry

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    # The engine computes in the server's own process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Engines that pin themselves to the first cores would compete for them.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # On CPU oneDNN keeps what it compiled for each number of tokens of an iteration, by default 1024 products of
    # 0.3 to 0.7 MB. Prompts that continue have ever new lengths; this many are the batch sizes of fifty responses.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
}
CPU_BLOCK = 128  # tokens per cache block of vLLM's CPU build


def vllm_environment(rollout: RolloutConfig) -> dict[str, str]:
    """Return the environment variables of a server with vLLM."""
    chosen = {"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")}
    if rollout.dtype == "float32":  # Triton rounds the factors of float32 products to TF32 by default
        chosen["TRITON_F32_DEFAULT"] = "ieee"
    return ENVIRONMENT | chosen


def cache_bytes_per_token(model: ModelConfig, rollout: RolloutConfig) -> int:
    """Return the size of one token's keys and values in all layers."""
    options = {"trust_remote_code": model.trust_remote_code, **model.override_config}
    config = AutoConfig.from_pretrained(str(resolve_model(model.path)), **options)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim * getattr(torch, rollout.dtype or "float32").itemsize


def cpu_cache_bytes(token_bytes: int, rollout: RolloutConfig, engines_per_machine: int) -> int:
    """Return the cache size per device on CPU, which vLLM must be given there: room for `max_num_seqs` responses of
    full length, at most a share of the free memory."""
    block = CPU_BLOCK * token_bytes
    blocks = math.ceil((rollout.max_model_len or 0) / CPU_BLOCK)
    free = psutil.virtual_memory().available * rollout.gpu_memory_utilization / engines_per_machine
    wanted = block * (blocks * rollout.max_num_seqs + 1)
    if rollout.full_determinism and wanted > free:  # the free memory of the moment must not decide how batches form
        raise ValueError(
            f"rollout.full_determinism: the cache of max_num_seqs={rollout.max_num_seqs} responses needs "
            f"{wanted / 2**30:.1f} GiB, but only {free / 2**30:.1f} may be used; lower max_num_seqs or max_model_len"
        )
    return int(max(min(wanted, free), block * (blocks + 1)) / rollout.tensor_model_parallel_size)


VLLM = EngineEntry(
    "hybridrl.core.rollout.vllm.engine", "VllmEngine", vllm_environment, "engine_kwargs.vllm.kv_cache_memory_bytes"
)

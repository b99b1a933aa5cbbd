"""How large an engine's cache is on CPU, where vLLM is told; on CUDA vLLM takes what is left of its share of a GPU."""

import math

import psutil
import torch
from transformers import AutoConfig

from hybridrl.config.model_directory import resolve_model
from hybridrl.config.schema import ModelConfig, RolloutConfig

CPU_BLOCK = 128  # tokens of a cache block of vLLM's CPU build


def cache_bytes_of_token(model: ModelConfig, rollout: RolloutConfig) -> int:
    """Keys and values of one token in every layer."""
    options = {"trust_remote_code": model.trust_remote_code, **model.override_config}
    config = AutoConfig.from_pretrained(str(resolve_model(model.path)), **options)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * getattr(torch, rollout.dtype or "float32").itemsize


def cpu_cache_bytes(token_bytes: int, rollout: RolloutConfig, slots: int) -> int:
    """Cache for `max_num_seqs` answers of full length, at most a share of the free memory; one device's part of it."""
    block = CPU_BLOCK * token_bytes
    blocks = math.ceil((rollout.max_model_len or 0) / CPU_BLOCK)
    free = psutil.virtual_memory().available * rollout.gpu_memory_utilization / slots
    wanted = block * (blocks * rollout.max_num_seqs + 1)
    if rollout.full_determinism and wanted > free:  # what is free at the moment must not decide how batches are formed
        raise ValueError(
            f"rollout.full_determinism: the cache of max_num_seqs={rollout.max_num_seqs} answers takes "
            f"{wanted / 2**30:.1f} GiB, and {free / 2**30:.1f} may be used; lower max_num_seqs or max_model_len"
        )
    return int(max(min(wanted, free), block * (blocks + 1)) / rollout.tensor_model_parallel_size)

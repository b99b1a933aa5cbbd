"""The size of an engine's cache of keys and values."""

import math
from typing import Any

import torch
from transformers import AutoConfig

from hybridrl.config.files import resolve_model
from hybridrl.config.schema import ModelConfig, RolloutConfig
from hybridrl.core.device import memory_left


def model_settings(model: ModelConfig) -> Any:
    """Return a model's settings as transformers reads them."""
    options = {"trust_remote_code": model.trust_remote_code, **model.override_config}
    return AutoConfig.from_pretrained(str(resolve_model(model.path)), **options)


def cache_bytes_per_token(model: ModelConfig, rollout: RolloutConfig) -> int:
    """Return the size of one token's keys and values in all layers."""
    config = model_settings(model).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim * getattr(torch, rollout.dtype or "float32").itemsize


def cpu_cache_bytes(token_bytes: int, rollout: RolloutConfig, engines_per_machine: int, block_tokens: int) -> int:
    """Return the cache size in bytes per device on CPU, where engines need it as a setting; a block of the cache has
    `block_tokens` tokens. It fits `max_num_seqs` responses of full length, but at most a share of the free memory."""
    block = block_tokens * token_bytes
    blocks = math.ceil((rollout.max_model_len or 0) / block_tokens)
    free = memory_left() * rollout.gpu_memory_utilization / engines_per_machine
    needed = block * (blocks * rollout.max_num_seqs + 1)
    if rollout.full_determinism and needed > free:  # batches must not depend on the free memory at the moment
        raise ValueError(
            f"rollout.full_determinism: the cache of max_num_seqs={rollout.max_num_seqs} responses needs "
            f"{needed / 2**30:.1f} GiB, but only {free / 2**30:.1f} may be used; lower max_num_seqs or max_model_len"
        )
    return int(max(min(needed, free), block * (blocks + 1)) / rollout.tensor_model_parallel_size)

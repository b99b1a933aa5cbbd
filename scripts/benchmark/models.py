"""Models with random weights for the benchmarks, sharded as in training."""

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen2Config

from hybridrl.config.schema import FSDPConfig, WrapPolicyConfig
from hybridrl.core.training import attention
from hybridrl.core.training.fsdp import local, shard
from hybridrl.core.training.layout import layout
from hybridrl.core.training.model import LanguageModel

# Qwen2.5-0.5B's, 1.5B's and 7B's shapes, models of 25, 100, 142 and 150 million parameters, and one for --tiny.
SHAPES = {
    "25m": {
        "vocab_size": 16384,
        "hidden_size": 384,
        "intermediate_size": 1280,
        "num_hidden_layers": 10,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    "150m": {
        "vocab_size": 32768,
        "hidden_size": 768,
        "intermediate_size": 2688,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
    "0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "1.5b": {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "7b": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "100m": {
        "vocab_size": 4096,
        "hidden_size": 768,
        "intermediate_size": 2560,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
    },
    "142m": {
        "vocab_size": 64000,
        "hidden_size": 768,
        "intermediate_size": 2688,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}
FSDP = FSDPConfig(
    fsdp_size=-1,
    ulysses_sequence_parallel_size=1,
    tensor_parallel_size=1,
    expert_parallel_size=1,
    param_offload=False,
    optimizer_offload=False,
    offload_policy=False,
    reshard_after_forward=True,
    forward_prefetch=False,
    compile_layers=False,
    model_dtype="float32",
    dtype="float32",
    full_determinism=False,
    wrap_policy=WrapPolicyConfig([]),
)


def sharded_model(shape: str) -> LanguageModel:
    """Return a model sharded over all ranks on CPU, in float32; no rank ever has all of it."""
    config = Qwen2Config(**{"tie_word_embeddings": True} | SHAPES[shape], architectures=["Qwen2ForCausalLM"])
    with torch.device("meta"):
        model = LanguageModel(AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME))
    ranks = dist.get_world_size()
    sharded = shard(model, FSDP, layout("cpu", ranks, ranks)).to_empty(device="cpu")
    base = sharded.model.model
    base.rotary_emb = type(base.rotary_emb)(config)  # its frequencies are not parameters
    for name, parameter in sharded.model.named_parameters():
        own = local(parameter.detach())
        # The layers' outputs outweigh the embedding: otherwise a greedy response would repeat one token.
        own.fill_(1) if name.endswith("norm.weight") else own.normal_(std=0.001 if "embed" in name else 0.05)
    if config.tie_word_embeddings:  # `to_empty` gives the head a memory of its own
        local(sharded.model.lm_head.weight.detach()).copy_(local(base.embed_tokens.weight.detach()))
    return sharded

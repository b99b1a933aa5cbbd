"""Small models of the supported families, and how they are loaded."""

import torch
from transformers import (
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    Glm4MoeConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from hybridrl.config.schema import ModelConfig
from hybridrl.core.training.loading import fill
from hybridrl.core.training.model import (
    HOST,
    LanguageModel,
    ValueModel,
    blank_language_model,
    blank_value_model,
    new_head,
)
from tests.sections import section_of

VOCABULARY = 48
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # outputs differ from token to token by more than any tolerance in these tests
}
FAMILIES = {
    "all heads their own keys": Qwen2Config(**SMALL, num_key_value_heads=4),
    "two heads a key": Qwen2Config(**SMALL, num_key_value_heads=2),
    "all heads one key, tied head": Qwen2Config(**SMALL, num_key_value_heads=1, tie_word_embeddings=True),
    "llama": LlamaConfig(**SMALL, num_key_value_heads=2),
    "qwen3": Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8),
    "learned positions": GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3
    ),
    "a sliding window in every layer": MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=3),
    "a sliding window in the second layer": Qwen2Config(
        **SMALL, num_key_value_heads=2, use_sliding_window=True, sliding_window=3, max_window_layers=1
    ),
}
LINEAR = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
# Families that transform their logits or scores, and mixtures of experts.
SPECIAL = {
    "capped scores and logits, a sliding window in the first layer": Gemma2Config(
        **SMALL,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=4,
        sliding_window=3,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=2.0,
    ),
    "divided logits": GraniteConfig(**SMALL, num_key_value_heads=2, logits_scaling=5.0, attention_multiplier=0.7),
    "multiplied logits, tied head": CohereConfig(**SMALL, num_key_value_heads=2, logit_scale=0.3),
    "experts": Qwen3MoeConfig(
        **SMALL, num_key_value_heads=2, head_dim=8, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24
    ),
    "experts under other names": MixtralConfig(
        **SMALL, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
    ),
    "experts selected with a bias buffer": Glm4MoeConfig(
        **SMALL,
        num_key_value_heads=2,
        head_dim=8,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    ),
    "latent attention": DeepseekV3Config(
        **SMALL,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=24,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    ),
    "a recurrence along the text": Qwen3_5TextConfig(**SMALL, **LINEAR),
    "a recurrence along the text, experts": Qwen3NextConfig(
        **SMALL,
        **LINEAR,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
    ),
    "attention sinks": GptOssConfig(
        **SMALL, num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=3
    ),
}


def model_config(path: str, **changes: object) -> ModelConfig:
    """Return a model section with this path, with default values unless changed."""
    values = {"path": path, "enable_gradient_checkpointing": False}
    return section_of(ModelConfig, "actor_rollout_ref.model", **values | changes)


def load_language_model(config: ModelConfig, dtype: torch.dtype) -> LanguageModel:
    """Load a model unsharded."""
    blank = blank_language_model(config, dtype)
    fill(blank.model, config.path, HOST)
    return blank


def load_value_model(config: ModelConfig, dtype: torch.dtype) -> ValueModel:
    """Load a saved value model, or a language model with a new head, unsharded."""
    blank = blank_value_model(config, dtype)
    fill(blank.model, config.path, HOST, new_head(blank))
    return blank

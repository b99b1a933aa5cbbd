"""Small models of the families that are trained here, and how they are loaded."""

from transformers import GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from hybridrl.config.schema import ModelConfig

VOCABULARY = 48
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # outputs that differ from token to token by more than any tolerance here
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


def model_config(path: str, **changes: object) -> ModelConfig:
    """A model section that names this directory, and changes nothing else unless said."""
    settings = {
        "path": path,
        "tokenizer_path": None,
        "trust_remote_code": False,
        "custom_chat_template": None,
        "override_config": {},
        "enable_gradient_checkpointing": False,
        "use_remove_padding": True,
    }
    return ModelConfig(**settings | changes)

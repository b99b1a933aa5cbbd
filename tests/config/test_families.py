import pytest

from hybridrl.config.catalog import why_unsupported
from hybridrl.config.checks.model import why_name_unsupported, why_not_served


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "model_type=t5: an encoder and a decoder"),
        ({"model_type": "idefics3", "vision_config": {"depth": 2}}, "of the models that read pictures, these families"),
        ({"model_type": "qwen3_omni", "thinker_config": {"a": 1}}, "thinker_config: sounds are not trained"),
        ({"model_type": "gemma3", "vision_config": {"a": 1}}, "its tokens of a picture attend to later ones"),
        ({"model_type": "glm_moe_dsa"}, "model_type=glm_moe_dsa: sparse attention to the tokens that an"),
        ({"model_type": "deepseek_v32", "index_topk": 2048}, "model_type=deepseek_v32: sparse attention"),
        ({"model_type": "llama4_text"}, "model_type=llama4_text: attention within chunks of the text, which"),
        ({"model_type": "phimoe"}, "router_jitter_noise is a threshold of that choice, not noise"),
        ({"model_type": "new", "index_topk": 64}, "index_topk=64: sparse attention to the tokens that an"),
        ({"model_type": "new", "attention_chunk_size": 8192}, "attention_chunk_size=8192: attention within chunks"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types has chunked_attention: attention"),
        ({"layer_types": ["heavily_compressed_attention"]}, "heavily_compressed_attention: compressed keys"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}, "quant_method=fp8: quantized"),
    ],
)
def test_a_model_that_cannot_be_trained_is_named_with_the_reason(settings, word):
    assert word in why_unsupported(settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "qwen2"},
        {"model_type": "gemma2", "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        {"model_type": "cohere", "logit_scale": 0.0625},
        {"model_type": "qwen3_moe", "num_experts": 128},
        {"model_type": "gpt_oss", "num_local_experts": 32},
        {"model_type": "gemma3_text", "sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]},
        {"model_type": "qwen3_next", "layer_types": ["linear_attention"], "mlp_layer_types": ["sparse"]},
        {"model_type": "llama", "attention_chunk_size": None},
        {"model_type": "qwen2_5_vl", "vision_config": {"depth": 2}, "text_config": {"model_type": "qwen2_5_vl_text"}},
        {"model_type": "phi3", "is_encoder_decoder": False, "quantization_config": None},
    ],
)
def test_other_models_pass(settings):
    assert why_unsupported(settings) is None


@pytest.mark.parametrize(
    "name",
    ["Qwen/Qwen2-VL-7B", "zai-org/GLM-4.5V", "openbmb/MiniCPM-o-2_6",
     "OpenGVLab/InternVL3-8B", "Qwen/Qwen2.5-Omni-7B", "llava-hf/llava-1.5-7b-hf", "meta-llama/Llama-3.2-11B-Vision"],
)  # fmt: skip
def test_families_that_are_not_trained_are_known_by_name_where_there_is_no_file(name):
    assert "it is of a family that reads pictures or sounds and is not trained" in why_name_unsupported(name)


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3-8B",
        "/models/Qwen3-VL-30B-A3B/",
        "Qwen/Qwen2.5-VL-7B",
        "zai-org/GLM-4.1V-9B",
        "/data/VL/Qwen3-8B",
        "deepseek-ai/DeepSeek-V3",
        "org/evl-7b",
        "Qwen/Qwen2.5-Math-7B",
        "a/o1",
    ],
)
def test_no_other_name_is_taken_for_one(name):
    assert why_name_unsupported(name) is None


def test_a_family_that_an_engine_computes_otherwise_can_only_be_fine_tuned():
    assert "vLLM has had no implementation of it since 0.23; it can be fine-tuned" in why_not_served(
        {"model_type": "bamba"}, 10
    )
    assert why_not_served({"model_type": "falcon_h1", "lm_head_multiplier": 0.3}, 10) is None


def test_a_family_whose_window_is_wider_in_the_engine_is_rejected_for_rows_longer_than_the_window():
    settings = {"model_type": "cohere2", "sliding_window": 4096}
    assert why_not_served(settings, 4096) is None
    assert "beyond sliding_window=4096 tokens vLLM computes other log-probs" in why_not_served(settings, 4097)
    assert why_not_served(settings | {"model_type": "gemma3_text"}, 4097) is None


def test_a_window_that_sglang_ignores_is_a_limit_of_rows():
    for kind in ("mistral", "qwen2"):
        settings = {"model_type": kind, "sliding_window": 4096}
        assert why_not_served(settings, 4096, "sglang") is None
        assert why_not_served(settings, 4097) is None
        reason = why_not_served(settings, 4097, "sglang")
        assert "beyond sliding_window=4096 tokens SGLang computes other log-probs" in reason
        assert "it has no window for them, and a row may have 4097" in reason
    assert (
        why_not_served({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False}, 9, "sglang") is None
    )
    assert why_not_served({"model_type": "mistral", "sliding_window": None}, 9, "sglang") is None
    assert why_not_served({"model_type": "gemma3_text", "sliding_window": 8}, 9, "sglang") is None
    assert "its window is a token wider" in why_not_served({"model_type": "cohere2", "sliding_window": 8}, 9, "sglang")


def test_a_family_for_which_sglang_has_no_code_on_cpu_is_rejected_there_only():
    assert "SGLang has no implementation of it" in why_not_served({"model_type": "bamba"}, 10, "sglang", "cuda")
    for settings, part in (
        ({"model_type": "qwen3_next", "linear_num_value_heads": 4}, "layers with a recurrent state"),
        ({"model_type": "falcon_h1", "mamba_d_ssm": 64}, "layers with a recurrent state"),
        ({"model_type": "gpt_oss"}, "attention sinks"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "latent attention"),
        ({"model_type": "gemma2", "final_logit_softcapping": 30.0}, "capped logits"),
        ({"model_type": "qwen2_moe"}, "the gate of shared experts"),
    ):
        reason = why_not_served(settings, 10, "sglang", "cpu")
        assert reason == f"model_type={settings['model_type']}: SGLang computes {part} on GPUs only"
        assert why_not_served(settings, 10, "sglang", "cuda") is None
    assert why_not_served({"model_type": "qwen3_moe", "num_experts": 8}, 10, "sglang", "cpu") is None
    gemma = {"model_type": "gemma3_text", "final_logit_softcapping": None, "attn_logit_softcapping": None}
    assert why_not_served(gemma, 10, "sglang", "cpu") is None

import pytest

from hybridrl.config.checks.model import why_name_unsupported, why_unsupported


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "model_type=t5: an encoder and a decoder"),
        ({"model_type": "qwen2_5_vl", "vision_config": {"depth": 2}}, "vision_config: the model reads more than text"),
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
        {"model_type": "phi3", "is_encoder_decoder": False, "quantization_config": None},
    ],
)
def test_other_models_pass(settings):
    assert why_unsupported(settings) is None


@pytest.mark.parametrize(
    "name",
    ["Qwen/Qwen2-VL-7B", "/models/Qwen3-VL-30B-A3B/", "zai-org/GLM-4.1V-9B-Thinking", "openbmb/MiniCPM-o-2_6",
     "OpenGVLab/InternVL3-8B", "Qwen/Qwen2.5-Omni-7B", "llava-hf/llava-1.5-7b-hf", "meta-llama/Llama-3.2-11B-Vision"],
)  # fmt: skip
def test_models_that_read_images_are_known_by_name_where_there_is_no_file(name):
    assert "the model reads more than text" in why_name_unsupported(name)


@pytest.mark.parametrize(
    "name",
    ["Qwen/Qwen3-8B", "/data/VL/Qwen3-8B", "deepseek-ai/DeepSeek-V3", "org/evl-7b", "Qwen/Qwen2.5-Math-7B", "a/o1"],
)
def test_no_other_name_is_taken_for_one(name):
    assert why_name_unsupported(name) is None

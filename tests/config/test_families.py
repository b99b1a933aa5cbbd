import pytest

from hybridrl.config.families import why_unsupported


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "model_type=t5: an encoder and a decoder"),
        ({"model_type": "qwen2_5_vl", "vision_config": {"depth": 2}}, "vision_config: the model reads more than text"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}, "quant_method=fp8: quantised"),
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

import pytest

from hybridrl.config.families import why_unsupported


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"model_type": "gemma2", "final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"model_type": "cohere", "logit_scale": 0.0625}, "logit_scale=0.0625"),
        ({"model_type": "granite", "logits_scaling": 8.0}, "logits_scaling=8.0"),
        ({"model_type": "gpt_oss"}, "attention sinks"),
        ({"model_type": "qwen3_moe", "num_experts": 128}, "num_experts=128"),
    ],
)
def test_a_family_that_would_be_computed_wrongly_is_named(settings, word):
    assert word in why_unsupported(settings)


@pytest.mark.parametrize(
    "settings", [{"model_type": "qwen2"}, {"model_type": "gemma3", "final_logit_softcapping": None}]
)
def test_other_families_pass(settings):
    assert why_unsupported(settings) is None

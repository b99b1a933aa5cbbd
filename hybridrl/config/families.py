"""Models that cannot be trained here, told by their config.json; refused with the reason rather than trained wrongly.

docs/models.md lists the families that were tried, these too.
"""

import re
from collections.abc import Mapping
from typing import Any

RECURRENT = re.compile("linear_(num|conv)|mamba_|ssm_|conv_L_cache")  # begins a value of layers that carry a state
RANDOM = re.compile("drop|jitter")  # in the name of a value by which a model disturbs itself in training

# Model types whose experts are chosen as DeepSeek-V3's are. transformers implies that, and leaves it out of the
# config.json that it writes; vLLM reads it there, and without it has no place for the router's corrections.
CORRECTED = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
CORRECTED_CHOICE = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def implied_values(settings: dict[str, Any]) -> dict[str, Any]:
    """What a config.json leaves out that an engine needs to compute as the trainer does."""
    if settings.get("model_type") not in CORRECTED:
        return {}
    return {name: value for name, value in CORRECTED_CHOICE.items() if settings.get(name) is None}


# Model type -> why an engine cannot take its weights from a trainer.
NOT_SERVED = {"gpt_oss": "vLLM copies its experts past the reload of weights, so an engine would keep the old ones"}


def why_not_served(settings: Mapping[str, Any]) -> str | None:
    """The reason why a model of these settings can be fine-tuned but not sampled from while it is trained, or None."""
    kind = settings.get("model_type")
    return f"model_type={kind}: {NOT_SERVED[kind]}; it can be fine-tuned (main_sft)" if kind in NOT_SERVED else None


def is_recurrent(settings: Mapping[str, Any]) -> bool:
    """Whether layers of such a model carry a state along the text, such as a convolution or a recurrence."""
    return any(RECURRENT.match(name) for name in settings)


def has_delta_rule(settings: Mapping[str, Any]) -> bool:
    """Whether the state is that of a gated delta rule, as in Qwen3-Next and Qwen3.5."""
    return "linear_num_value_heads" in settings


def disturbances(settings: Mapping[str, Any]) -> dict[str, float]:
    """The values by which a model of these settings drops or disturbs activations at random in training."""
    return {
        name: value for name, value in settings.items() if RANDOM.search(name) and isinstance(value, float) and value
    }


# How families that read images or sounds are named, where there is no config.json to look into.
SENSES = re.compile(
    r"(?i)(?<![a-z])(vl|vision|omni|llava|pixtral|paligemma)(?![a-z])|internvl|minicpm-[vo]\b|-\d(\.\d)?v\b"
)


def why_name_unsupported(path: str) -> str | None:
    """As `why_unsupported`, by the name alone."""
    found = SENSES.search(path.rstrip("/").rpartition("/")[2])
    return (
        f"by its name ({found[0].strip('-')}) the model reads more than text, which is not trained yet"
        if found
        else None
    )


def why_unsupported(settings: dict[str, Any]) -> str | None:
    """The reason why a model of these settings cannot be trained, or None."""
    kind = settings.get("model_type")
    if settings.get("is_encoder_decoder"):
        return f"model_type={kind}: an encoder and a decoder; only models that go on from a text are trained"
    senses = [name for name in ("vision_config", "audio_config", "thinker_config") if settings.get(name)]
    if senses:
        return f"{senses[0]}: the model reads more than text, which is not trained yet"
    quantised = settings.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "unknown")
        return f"quant_method={method}: quantised weights cannot be trained; name the model that they were made of"
    return None

"""Models that cannot be trained here, told by their config.json; refused with the reason rather than trained wrongly.

docs/models.md lists the families that were tried, these too.
"""

import re
from typing import Any

# Model type -> why it was found to fail.
FAILING = {
    "gpt_oss": "it has attention sinks, which the trainer's attention lacks",
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
    if kind in FAILING:
        return f"model_type={kind}: {FAILING[kind]}"
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

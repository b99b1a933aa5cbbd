"""Model families that the trainer would compute wrongly, told by their config.json; refused rather than trained."""

from typing import Any

# Setting -> what the model does with it, which our log-probs do not.
UNSUPPORTED = {
    "final_logit_softcapping": "bends its logits after the head",
    "attn_logit_softcapping": "bends its attention scores",
    "logit_scale": "scales its logits after the head",
    "logits_scaling": "scales its logits after the head",
}


def why_unsupported(settings: dict[str, Any]) -> str | None:
    """The reason why a model of these settings cannot be trained, or None."""
    if settings.get("model_type") == "gpt_oss":
        return "model_type=gpt_oss has attention sinks, which the trainer's attention lacks"
    experts = [name for name in ("num_experts", "num_local_experts", "n_routed_experts") if settings.get(name)]
    if experts:
        return f"{experts[0]}={settings[experts[0]]}: mixtures of experts are not supported yet"
    for name, effect in UNSUPPORTED.items():
        if settings.get(name) not in (None, 1):
            return f"{name}={settings[name]}: the model {effect}, which the trainer does not yet"
    return None

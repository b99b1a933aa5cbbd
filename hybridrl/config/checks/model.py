"""Whether a model can be trained and served, judging by its config.json, and which of its settings are changed.

docs/models.md lists the families that were tried, also those that are rejected here with the reason.
"""

import json
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hybridrl.config.files import resolve_model
from hybridrl.config.findings import Checker
from hybridrl.config.schema import ModelConfig, RolloutConfig

ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
# Head sizes that vLLM's attention on CPU supports (CPUAttentionBackend.get_supported_head_sizes).
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
AUXILIARY_LOSS = ("output_router_logits", "router_aux_loss_coef")

RECURRENT = re.compile(
    "linear_(num|conv)|mamba_|ssm_|conv_L_cache"
)  # begins a setting of layers with a recurrent state
RANDOM = re.compile("drop|jitter")  # in the name of a setting that makes training random
# How families that read images or sounds are named, if there is no config.json.
MULTIMODAL = re.compile(
    r"(?i)(?<![a-z])(vl|vision|omni|llava|pixtral|paligemma)(?![a-z])|internvl|minicpm-[vo]\b|-\d(\.\d)?v\b"
)
# Model types whose experts are chosen as DeepSeek-V3's are. transformers implies that, and leaves it out of the
# config.json that it writes; vLLM reads it there, and without it has no place for the router's corrections.
CORRECTED = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
CORRECTED_CHOICE = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
# Model type -> why an engine cannot take its weights from a trainer.
NOT_SERVED = {"gpt_oss": "vLLM copies its experts past the reload of weights, so an engine would keep the old ones"}


def why_unsupported(settings: Mapping[str, Any]) -> str | None:
    """The reason why a model with these settings cannot be trained, or None."""
    kind = settings.get("model_type")
    if settings.get("is_encoder_decoder"):
        return f"model_type={kind}: an encoder and a decoder; only decoder-only models are trained"
    inputs = [name for name in ("vision_config", "audio_config", "thinker_config") if settings.get(name)]
    if inputs:
        return f"{inputs[0]}: the model reads more than text, which is not trained yet"
    if quantized := settings.get("quantization_config"):
        method = quantized.get("quant_method", "unknown")
        return f"quant_method={method}: quantized weights cannot be trained; name the original model"
    return None


def why_name_unsupported(path: str) -> str | None:
    """As `why_unsupported`, judging by the name only."""
    match = MULTIMODAL.search(path.rstrip("/").rpartition("/")[2])
    if match is None:
        return None
    return f"by its name ({match[0].strip('-')}) the model reads more than text, which is not trained yet"


def why_not_served(settings: Mapping[str, Any]) -> str | None:
    """The reason why a model with these settings can be fine-tuned but not trained with rollout, or None."""
    kind = settings.get("model_type")
    return f"model_type={kind}: {NOT_SERVED[kind]}; it can be fine-tuned (main_sft)" if kind in NOT_SERVED else None


def disturbances(settings: Mapping[str, Any]) -> dict[str, float]:
    """The settings by which a model drops or disturbs activations at random in training."""
    return {
        name: value for name, value in settings.items() if RANDOM.search(name) and isinstance(value, float) and value
    }


def absolute(path: str) -> str:
    """The absolute path of a file or directory, for workers on other machines; any other name unchanged."""
    return str(Path(path).absolute()) if Path(path).exists() else path


def check_model(key: str, model: ModelConfig, longest: int, hint: str, check: Checker) -> None:
    """Resolve `override_config`; check whether a local model can be trained and takes the longest sequence (`hint` says
    how to shorten it). Paths become absolute, as the workers of a Ray cluster run elsewhere."""
    settings, path_key = _settings(model), f"{key}.path"
    implied = CORRECTED_CHOICE if settings.get("model_type") in CORRECTED else {}
    overrides = _overrides(f"{key}.override_config", dict(model.override_config), settings, check)
    model.override_config = {name: value for name, value in implied.items() if settings.get(name) is None} | overrides
    for name, value in disturbances(settings).items():
        if name not in model.override_config:
            cause = f"{key}: {name}={value} of config.json is disabled"
            fix = f"to enable it, set {key}.override_config.{name}={value}"
            check.findings.warn("setting", cause, fix, keys=path_key)
    settings |= model.override_config
    reason = why_unsupported(settings) if settings else why_name_unsupported(model.path)
    if reason:
        check.error(path_key, reason)
    if settings.get("auto_map") and not model.trust_remote_code and not has_model_code(settings.get("model_type")):
        check.error(
            (path_key, f"{key}.trust_remote_code"),
            "its config.json names Python files of the model (auto_map), which run only if they are trusted",
            f"read them, then set {key}.trust_remote_code=true",
        )
    limit = settings.get("max_position_embeddings")
    rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    if limit is not None and "factor" not in rope and longest > limit:  # a factor extends the limit
        check.error(path_key, f"the model takes {limit} positions, a row may have {longest}", hint)
    model.path = absolute(model.path)
    model.external_lib = [absolute(name) for name in model.external_lib]


def check_served(key: str, model: ModelConfig, device: str, check: Checker) -> None:
    """Check whether an engine can compute with the model, and take its weights."""
    settings = _settings(model)
    if reason := why_not_served(settings):
        check.error(f"{key}.path", reason)
    settings |= model.override_config
    heads, width = settings.get("num_attention_heads"), settings.get("hidden_size")
    size = settings.get("head_dim") or (width // heads if heads and width else None)
    # A model with latent attention has another backend.
    if device == "cpu" and size and not settings.get("kv_lora_rank") and size not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        cause = f"its attention heads have size {size}, and vLLM on CPU supports {sizes}"
        check.error(f"{key}.path", cause, "use another model, or a GPU")


def check_sequence_parallel(
    key: str, size: int, model_key: str, model: ModelConfig, devices: int, check: Checker
) -> None:
    """Check whether as many devices as requested can share a row of this model."""
    if size == 1:
        return
    size_key, settings = f"{key}.ulysses_sequence_parallel_size", _settings(model) | model.override_config
    heads = settings.get("num_attention_heads") or settings.get("n_head") or 0  # unknown for a hub model
    if devices % size or heads % size:
        fitting = max(number for number in range(1, size) if devices % number == heads % number == 0)
        also = f" and the {heads} attention heads of {model_key}.path={model.path}" if heads else ""
        keys = (size_key, f"{model_key}.path", "trainer.n_gpus_per_node", "trainer.nnodes")
        check.error(keys, f"must divide the {devices} devices{also}", f"set {fitting}")
    if not model.use_remove_padding:
        padding_key = f"{model_key}.use_remove_padding"
        check.error((size_key, padding_key), "only packed rows can be shared", f"set {padding_key}=true")


def resolve_recurrence(key: str, model: ModelConfig, rollout: RolloutConfig, check: Checker) -> None:
    """Set what an engine on CPU requires for layers with a recurrent state."""
    settings = _settings(model)
    if any(RECURRENT.match(name) for name in settings) and rollout.enable_prefix_caching:
        rollout.enable_prefix_caching = False
        _changed(f"{key}.enable_prefix_caching", "off: on CPU no recurrent state of a prefix is cached", check)
    if "linear_num_value_heads" not in settings:  # those of a gated delta rule, as in Qwen3-Next and Qwen3.5
        return
    if rollout.dtype is None:
        rollout.dtype = "bfloat16"
        _changed(f"{key}.dtype", "bfloat16: vLLM computes this model's linear attention on CPU in no other type", check)
    elif rollout.dtype not in ("bf16", "bfloat16"):
        check.error(f"{key}.dtype", "on CPU vLLM computes its linear attention in bfloat16 only", "set bf16")
    if model.lora_rank and not model.lora.merge:
        model.lora.merge = True
        cause = "on: on CPU vLLM has no adapters for this model's linear attention"
        _changed("actor_rollout_ref.model.lora.merge", cause, check)


def _changed(key: str, cause: str, check: Checker) -> None:
    check.findings.warn("setting", f"{key} is {cause}", keys=key)


def has_model_code(kind: str | None) -> bool:
    """Whether transformers has this type of model; checked without importing it, which takes seconds."""
    spec = find_spec("transformers")
    root = Path(spec.origin).parent if spec and spec.origin else None
    return bool(root and kind and (root / "models" / kind.replace("-", "_")).is_dir())


def _settings(model: ModelConfig) -> dict[str, Any]:
    """A local model's config.json; empty for a hub model."""
    file = resolve_model(model.path) / "config.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _overrides(key: str, changes: dict[str, Any], settings: dict[str, Any], check: Checker) -> dict[str, Any]:
    """Values to change in config.json, each complete: a nested one is merged into the model's."""

    def warn(name: str, cause: str) -> None:
        check.findings.warn("setting", f"{key}.{name} has no effect: {cause}", keys=f"{key}.{name}")

    changes |= changes.pop("model_config", None) or {}
    attention = changes.pop("attn_implementation", None)
    reason = "the trainer has its own implementation, for packed rows"
    if attention in ATTENTION:
        warn(f"attn_implementation={attention}", reason)
    elif attention is not None:
        cause = f"{key}.attn_implementation={attention}: there is no such attention"
        check.findings.error("conflict", cause, f"leave it out, {reason}", keys=f"{key}.attn_implementation")
    if any(dict(changes.pop("moe_config", None) or {}).values()):
        cause = f"{key}.moe_config: routers cannot be frozen yet"
        check.findings.error("conflict", cause, "leave it out, all weights are trained", keys=f"{key}.moe_config")
    for name in AUXILIARY_LOSS:
        if changes.pop(name, None):
            warn(name, "routers are trained by the policy loss only")
    for name, value in changes.items():
        if isinstance(value, Mapping) and isinstance(settings.get(name), Mapping):
            changes[name] = {**settings[name], **value}
    return _rope(changes, settings)


def _rope(changes: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings in the one place where transformers 5 reads them: in their old places they would be ignored."""
    scaling, theta = changes.pop("rope_scaling", None), changes.pop("rope_theta", None)
    if scaling is None and theta is None:
        return changes
    old, new = dict(settings.get("rope_parameters") or settings.get("rope_scaling") or {}), dict(scaling or {})
    for values in (old, new):
        if "type" in values:
            values["rope_type"] = values.pop("type")
    bases = [base for base in (theta, old.get("rope_theta"), settings.get("rope_theta")) if base]
    merged = {"rope_type": "default", **old, **new}
    return changes | {"rope_parameters": {**merged, "rope_theta": bases[0]} if bases else merged}

"""Checks of a model by its config.json: whether it can be trained and served, changes of its settings, and settings of
LoRA that cannot work or have no effect.

docs/models.md lists the tested families, and the rejected ones with the reason. The names of layers for LoRA are
checked when the model is loaded (core/training/lora.py).
"""

import json
import re
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hybridrl.config.catalog import ALL_LINEAR, ENGINE_RANKS, EXPERTS, NO_PLAN, disturbances, why_unsupported
from hybridrl.config.files import adapter_settings, expected_kind, resolve_model
from hybridrl.config.findings import Checker, show
from hybridrl.config.schema import ActorRolloutRefConfig, FSDPConfig, ModelConfig, RolloutConfig

LARGE = 1 << 23  # numbers of an embedding
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
# Head sizes of vLLM's kernels on CPU: attention (CPUAttentionBackend.get_supported_head_sizes), a latent and its rotary
# part (CPUMLABackend), and keys and values of a gated delta rule (chunk_gated_delta_rule_cpu).
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
CPU_LATENT, CPU_DELTA_SIZES, CPU_DELTA_WIDTHS = (512, 64), (64, 128), (4,)
SECTIONS = ("model_config", "moe_config")  # sections of verl's override_config
AUXILIARY_LOSS = ("output_router_logits", "router_aux_loss_coef")

RECURRENT = re.compile("linear_(num|conv)|mamba_|ssm_|conv_L_cache")  # settings of layers with a recurrent state
DELTA_RULE = "linear_num_value_heads"  # a setting of layers with a gated delta rule, as in Qwen3-Next and Qwen3.5
# Text models whose module in vLLM imports a processor of pictures, and so torchvision. All models that see do.
IMPORT_TORCHVISION = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
DELTA_RULE_KERNELS = "fla"  # the package that transformers trains them with, if it is installed
# Names of families that read pictures or sounds and are not trained, for models without a config.json.
MULTIMODAL = re.compile(
    r"(?i)(?<![a-z])(?<!qwen2\.5-)(?<!qwen3-)vl(?![a-z])|(?<![a-z])(vision|omni|llava|pixtral|paligemma)(?![a-z])"
    r"|internvl|minicpm-[vo]\b|-(?!4\.1)\d(\.\d)?v\b"
)
# Model type -> the choice of its experts. transformers implies these values, and omits them from config.json; vLLM
# reads them there, and has no place for the router's corrections without them.
IMPLIED = {
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "minimax_m2": {"scoring_func": "sigmoid", "use_routing_bias": True},
}
# Engine -> model type -> reason why the engine cannot take weights from a trainer.
NOT_SERVED = {
    "vllm": {
        "gpt_oss": "vLLM copies its experts past the reload of weights, so an engine would keep the old ones",
        "bamba": "vLLM has had no implementation of it since 0.23",
    },
    "sglang": {"bamba": "SGLang has no implementation of it"},
}
# Model type -> reason why vLLM computes it wrongly on CPU.
WRONG_ON_CPU = {"glm4v": "vLLM on CPU computes its log-probs otherwise (by 0.13, for a small random model)"}
# Model types with a window one token wider in engines than in transformers; model types without a window in SGLang.
WIDER_WINDOW = ("cohere2", "cohere2_moe")
NO_WINDOW = ("mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "starcoder2")
# Beginning of a model type, or of a setting with a value -> the part of the model that SGLang computes on GPUs only.
GPU_ONLY = {
    RECURRENT.pattern: "layers with a recurrent state",
    "kv_lora_rank": "latent attention",
    "(attn|final)_logit_softcapping": "capped logits",
    "gpt_oss": "attention sinks",
    "qwen2_moe": "the gate of shared experts",
}

# Features of peft beyond a pair of matrices next to a linear layer -> the value that turns them off.
PLAIN = {"use_dora": False, "use_rslora": False, "lora_bias": False, "bias": "none", "rank_pattern": {}}
PLAIN |= {"alpha_pattern": {}, "layer_replication": None, "target_parameters": None, "trainable_token_indices": None}


def why_name_unsupported(path: str) -> str | None:
    """Like `why_unsupported`, by the name only."""
    match = MULTIMODAL.search(path.rstrip("/").rpartition("/")[2])
    if match is None:
        return None
    return f"by its name ({match[0].strip('-')}) it is of a family that reads pictures or sounds and is not trained"


def why_not_served(settings: Mapping[str, Any], longest: int, engine: str = "vllm", device: str = "") -> str | None:
    """The reason why a model with these settings can be fine-tuned, but not trained with rollout by this engine (of
    sequences up to `longest` tokens), or None."""
    kind, window, sglang = settings.get("model_type"), settings.get("sliding_window"), engine == "sglang"
    if reason := NOT_SERVED.get(engine, NOT_SERVED["vllm"]).get(kind):
        return f"model_type={kind}: {reason}; it can be fine-tuned (main_sft)"
    names = [str(kind), *(name for name, value in settings.items() if value)]
    parts = [part for start, part in GPU_ONLY.items() if any(re.match(start, name) for name in names)]
    if sglang and device == "cpu" and parts:
        return f"model_type={kind}: SGLang computes {parts[0]} on GPUs only"
    if sglang and settings.get("vision_config"):
        return (
            f"model_type={kind}: SGLang would sample placeholders of pictures, which the trainer never does; use vLLM"
        )
    if not sglang and device == "cpu" and (reason := WRONG_ON_CPU.get(str(kind)) or _missing_kernel(settings)):
        return f"{reason}; use another model, or a GPU"
    difference = "its window is a token wider" if kind in WIDER_WINDOW else ""
    if sglang and kind in NO_WINDOW and settings.get("use_sliding_window", True):
        difference = "it has no window for them"
    if difference and isinstance(window, int) and longest > window:
        cause = f"model_type={kind}: beyond sliding_window={window} tokens {'SGLang' if sglang else 'vLLM'} computes "
        return f"{cause}other log-probs than the trainer, as {difference}, and a row may have {longest}"
    return None


def _missing_kernel(settings: Mapping[str, Any]) -> str:
    """Describe the first size for which vLLM has no kernel on CPU; empty if there is none."""
    heads, width = settings.get("num_attention_heads"), settings.get("hidden_size")
    size = settings.get("head_dim") or (width // heads if heads and width else None)
    keys, values = settings.get("linear_key_head_dim", 128), settings.get("linear_value_head_dim", 128)
    latent = settings.get("kv_lora_rank")  # heads of a latent have another kernel
    for subject, value, sizes in (
        ("its attention heads have size", None if latent else size, CPU_HEAD_SIZES),
        ("kv_lora_rank is", latent, CPU_LATENT[:1]),
        ("qk_rope_head_dim is", settings.get("qk_rope_head_dim") if latent else None, CPU_LATENT[1:]),
        ("linear_key_head_dim is", keys, CPU_DELTA_SIZES),
        ("linear_value_head_dim is", values, (keys,)),
        ("linear_conv_kernel_dim is", settings.get("linear_conv_kernel_dim"), CPU_DELTA_WIDTHS),
    ):
        if value and value not in sizes:
            return f"{subject} {value}, and vLLM on CPU supports {', '.join(map(str, sizes))}"
    return ""


def resolve_dtype(name: str | None, device: str) -> str:
    return DTYPES.get(name, name) if name else "bfloat16" if device == "cuda" else "float32"


def absolute(path: str) -> str:
    """The absolute path of a file or directory, for workers on other machines; any other name unchanged."""
    return str(Path(path).absolute()) if Path(path).exists() else path


def model_code(kind: str | None) -> Path | None:
    """The directory of this type of model in transformers. transformers is not imported, which takes seconds."""
    spec = find_spec("transformers")
    if not kind or spec is None or spec.origin is None:
        return None
    directory = Path(spec.origin).parent / "models" / kind.replace("-", "_").removesuffix("_text")
    return directory if directory.is_dir() else None


def check_plans(key: str, model: ModelConfig, fsdp_key: str, fsdp: FSDPConfig, check: Checker) -> None:
    """Check whether transformers has the plans to shard a model's layers and experts. Only local models are checked, by
    the source text of their family's configuration; a run checks the model itself."""
    settings = model_settings(model)
    kind = (settings.get("text_config") or settings).get("model_type")
    directory = model_code(kind)
    code = "".join(file.read_text(encoding="utf-8") for file in directory.glob("config*.py")) if directory else ""
    for name, size in (("tensor", fsdp.tensor_parallel_size), ("expert", fsdp.expert_parallel_size)):
        if size > 1 and code and f"base_model_{name[0]}p_plan" not in code:
            keys, fix = f"{fsdp_key}.{name}_parallel_size {key}.path", "set 1, and shard with FSDP alone"
            check.error(keys, NO_PLAN.format(name, kind), fix)


def model_settings(model: ModelConfig) -> dict[str, Any]:
    """A local model's config.json, and at the same level its settings for text; empty for a hub model."""
    file = resolve_model(model.path) / "config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return {**(settings.get("text_config") or {}), **settings} if settings.get("vision_config") else settings


def is_large(model: ModelConfig) -> bool:
    """Whether a local model's embedding is so large (LARGE) that two engines and trainers would fill a laptop."""
    try:
        settings = model_settings(model)
        settings = settings.get("text_config") or settings
        return int(settings["hidden_size"]) * int(settings["vocab_size"]) >= LARGE
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # the checks of the model report it
        return False


def experts_of(settings: Mapping[str, Any]) -> int:
    """Return the number of experts per layer of a mixture, from its config.json; 0 for other models."""
    settings = settings.get("text_config") or settings
    return next((settings[name] for name in EXPERTS if settings.get(name)), 0)


def check_model(key: str, model: ModelConfig, longest: int, hint: str, check: Checker, name: str = ".path") -> None:
    """Resolve `override_config`; check whether a local model can be trained on the longest sequence (`hint`: the fix to
    shorten it). Paths become absolute, since the workers of a Ray cluster run elsewhere. `name`: the path's key."""
    check, settings = check.at(key), model_settings(model)
    owner = key if name == ".path" else "actor_rollout_ref.model"  # the section with its further keys
    implied = IMPLIED.get(settings.get("model_type", ""), {})
    overrides = _overrides(dict(model.override_config), settings, check.at(f"{key}.override_config"))
    missing = {option: value for option, value in implied.items() if settings.get(option) is None}
    model.override_config = missing | overrides
    for option, value in disturbances(settings).items():
        if option not in model.override_config:
            cause = f"{key}: {option}={value} of config.json is disabled"
            check.warn(name, cause, f"to enable it, set {owner}.override_config.{option}={value}", valued=False)
    settings |= model.override_config
    if reason := why_unsupported(settings) if settings else why_name_unsupported(model.path):
        check.error(name, reason)
    if settings.get("auto_map") and not model.trust_remote_code:
        code = "its config.json names Python files of the model (auto_map)"
        if model_code(settings.get("model_type")):
            cause = f"{code}, which transformers' own code replaces; saved models do not name them"
            check.findings.info("setting", f"{key}{name}={model.path}: {cause}", keys=f"{key}{name}", value=model.path)
        else:
            cause = f"{code}, which run only if they are trusted"
            check.error(
                f"{name} {owner}.trust_remote_code", cause, f"read them, then set {owner}.trust_remote_code=true"
            )
    limit = settings.get("max_position_embeddings")
    rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    if limit is not None and "factor" not in rope and longest > limit:  # a factor extends the limit
        check.error(name, f"the model takes {limit} positions, a row may have {longest}", hint)
    model.path, model.external_lib = absolute(model.path), [absolute(name) for name in model.external_lib]


def check_served(key: str, model: ModelConfig, rollout: RolloutConfig, device: str, check: Checker) -> None:
    """Check whether an engine can compute with the model, and take its weights."""
    changes = model.override_config.items()  # as written: invalid values are reported with the model
    usable = {name: value for name, value in changes if not _expected(name, value)}
    settings = model_settings(model) | usable
    if reason := why_not_served(settings, rollout.max_model_len or 0, rollout.name, device):
        check.error(f"{key}.path", reason)
    needs_torchvision = settings.get("vision_config") or {*settings.get("architectures", ())} & {*IMPORT_TORCHVISION}
    if needs_torchvision and rollout.name == "vllm" and find_spec("torch") and find_spec("torchvision") is None:
        index = " --extra-index-url https://download.pytorch.org/whl/cpu" if device == "cpu" else ""
        fix = f"pip install torch=={version('torch')} torchvision{index}"
        check.error(f"{key}.path", "vLLM needs torchvision for this model, and it is not installed", fix)
    heads = settings.get("num_attention_heads")
    ranks, groups = rollout.tensor_model_parallel_size, settings.get("num_key_value_heads") or heads
    if heads and not _divides(ranks, heads, groups):
        fitting = [n for n in range(1, heads + 1) if _divides(n, heads, groups)]
        cause = f"the model has {heads} attention heads in {groups} groups, which cannot be divided by {ranks}"
        keys = f"actor_rollout_ref.rollout.tensor_model_parallel_size {key}.path"
        check.error(keys, cause, f"choose {' | '.join(map(str, fitting))}")


def _divides(ranks: int, heads: int, groups: int) -> bool:
    """Whether an engine with this number of ranks can divide attention heads in this number of groups."""
    return heads % ranks == 0 and (groups % ranks == 0 or ranks % groups == 0)


def check_recurrence(key: str, model: ModelConfig, device: str, check: Checker) -> None:
    """Report that the kernels for a model's layers with a gated delta rule are not installed."""
    if device == "cuda" and DELTA_RULE in model_settings(model) and find_spec(DELTA_RULE_KERNELS) is None:
        cause = "without flash-linear-attention its linear attention is trained by a plain, slower implementation"
        check.warn(f"{key}.path", cause, "pip install flash-linear-attention (the extra `linear`)")


def resolve_for_cpu(key: str, model: ModelConfig, rollout: RolloutConfig, check: Checker) -> None:
    """Set what an engine on CPU requires for layers with a recurrent state (vLLM's), and for experts."""

    def changed(key: str, cause: str) -> None:
        check.warn(key, f"{key} is {cause}", valued=False)

    settings, sglang = model_settings(model), rollout.name == "sglang"
    if any(RECURRENT.match(name) for name in settings) and rollout.enable_prefix_caching:
        rollout.enable_prefix_caching = False
        changed(f"{key}.enable_prefix_caching", "off: on CPU no recurrent state of a prefix is cached")
    recurrent = DELTA_RULE in settings and not sglang
    if model.lora_rank and not model.lora.merge and (recurrent or experts_of(settings)):
        model.lora.merge = True
        cause = f"on: on CPU {'SGLang' if sglang else 'vLLM'} has no adapters for "
        cause += "its linear attention" if recurrent else "mixtures of experts"
        changed("actor_rollout_ref.model.lora.merge", cause)
    if recurrent and rollout.dtype is None:
        rollout.dtype = "bfloat16"
        changed(f"{key}.dtype", "bfloat16: vLLM computes this model's linear attention on CPU in no other type")
    elif recurrent and rollout.dtype not in ("bf16", "bfloat16"):
        check.error(f"{key}.dtype", "on CPU vLLM computes its linear attention in bfloat16 only", "set bf16")


def _expected(name: str, value: Any) -> str:
    """Describe the valid values of a setting; empty if this value is valid."""
    if name in SECTIONS:
        return "" if isinstance(value, Mapping | None) else "names and values"
    return expected_kind("config.json", name, value)


def _overrides(changes: dict[str, Any], settings: dict[str, Any], check: Checker) -> dict[str, Any]:
    """Complete values to change in config.json: nested values are merged into the model's."""
    if isinstance(inner := changes.get("model_config"), Mapping | None):
        changes.pop("model_config", None)
        changes |= inner or {}
    for name, value in list(changes.items()):
        if expected := _expected(name, value):
            check.error(f".{name}", f"{check.place}.{name}={show(value):.60}: {expected} is expected", valued=False)
            del changes[name]
    attention = changes.pop("attn_implementation", None)
    reason = "the trainer has its own implementation, for packed rows"
    if attention in ATTENTION:
        check.idle([f".attn_implementation={attention}"], f": {reason}")
    elif attention is not None:
        cause = f"{check.place}.attn_implementation={attention}: there is no such attention"
        check.error(".attn_implementation", cause, f"leave it out, {reason}", valued=False)
    if any(dict(changes.pop("moe_config", None) or {}).values()):
        cause = f"{check.place}.moe_config: routers cannot be frozen yet"
        check.error(".moe_config", cause, "leave it out, all weights are trained", valued=False)
    for name in AUXILIARY_LOSS:
        if changes.pop(name, None):
            check.idle(f".{name}", ": routers are trained by the policy loss only")
    for name, value in changes.items():
        if isinstance(value, Mapping) and isinstance(settings.get(name), Mapping):
            changes[name] = {**settings[name], **value}
    scaling, theta = changes.pop("rope_scaling", None), changes.pop("rope_theta", None)
    return changes | _rotary(scaling, theta, settings)


def _rotary(scaling: Any, theta: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings where transformers 5 reads them: it would ignore them in their old places."""
    if scaling is None and theta is None:
        return {}
    old, new = dict(settings.get("rope_parameters") or settings.get("rope_scaling") or {}), dict(scaling or {})
    for values in (old, new):
        if "type" in values:
            values["rope_type"] = values.pop("type")
    bases = [base for base in (theta, old.get("rope_theta"), settings.get("rope_theta")) if base]
    merged = {"rope_type": "default", **old, **new}
    return {"rope_parameters": {**merged, "rope_theta": bases[0]} if bases else merged}


def resolve_lora(key: str, model: ModelConfig, check: Checker, *, served: bool) -> None:
    """Take rank, alpha and layers from the adapter if one is named; warn about settings without effect. `served`: a
    rollout engine computes with the model."""
    check = check.at(key)
    if model.lora_adapter_path and Path(model.lora_adapter_path).is_dir():  # otherwise it is on another machine
        _resolve_adapter(key, model, check)
    if model.lora_rank:
        if model.lora_alpha == 0:
            check.error(".lora_alpha", "the adapter would have no weight", f"set {key}.lora_alpha={model.lora_rank}")
        if model.lora.merge and not served:
            check.warn(".lora.merge", "has no effect: no rollout engine computes with this model")
        return
    idle = {
        ".lora_alpha": model.lora_alpha not in (0, 16),
        ".target_modules": model.target_modules != ALL_LINEAR,
        ".exclude_modules": bool(model.exclude_modules),
        ".lora.merge": model.lora.merge,
        ".lora.dropout": model.lora.dropout > 0,
    }
    for name in (name for name, is_set in idle.items() if is_set):
        check.warn(f"{name} .lora_rank", f"has no effect without {key}.lora_rank")


def _resolve_adapter(key: str, model: ModelConfig, check: Checker) -> None:
    path = str(Path(model.lora_adapter_path or "").absolute())
    settings = adapter_settings(path)
    if other := [name for name, plain in PLAIN.items() if settings.get(name, plain) not in (plain, None)]:
        cause = f"it has {', '.join(other)}, and only plain LoRA can be trained"
        check.error(".lora_adapter_path", cause, "merge it with peft first")
    rank, layers = int(settings["r"]), settings["target_modules"]
    if model.lora_rank not in (0, rank):
        cause = f"the adapter {path} has rank {rank}"
        check.error(".lora_rank .lora_adapter_path", cause, f"set {key}.lora_rank={rank}")
    model.lora_adapter_path, model.lora_rank, model.lora_alpha = path, rank, int(settings["lora_alpha"])
    model.target_modules, model.exclude_modules = [layers] if isinstance(layers, str) else sorted(layers), []
    names = ", ".join(model.target_modules)
    cause = f"training continues with rank {rank} and lora_alpha {model.lora_alpha} on {names}"
    check.warn(".lora_adapter_path", cause)
    base = settings.get("base_model_name_or_path")
    if base and base != str(Path(model.path).absolute()) and base != model.path:
        check.warn(".lora_adapter_path .path", f"it was trained on {base}, and is applied to {model.path} here")


def check_lora_sync(section: ActorRolloutRefConfig, check: Checker) -> None:
    """Check the sync of the policy's adapter to the rollout engine, and its consequences for the reference."""
    key, model = "actor_rollout_ref", section.model
    check = check.at(key)
    if model.lora_rank > ENGINE_RANKS[-1] and not model.lora.merge:
        cause = f"the rollout engine takes adapters up to rank {ENGINE_RANKS[-1]}"
        check.error(".model.lora_rank", cause, f"set {key}.model.lora.merge=true, which syncs merged weights")
    if model.lora_rank and section.ref.refresh_freq > 0:
        cause = "with LoRA the reference is the model without its adapter, and cannot become a copy of the policy"
        check.error(".ref.refresh_freq .model.lora_rank", cause, f"set {key}.ref.refresh_freq=-1")

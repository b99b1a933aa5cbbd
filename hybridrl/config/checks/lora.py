"""Which settings of LoRA cannot work, and which have no effect given the others.

Whether the model has layers with the requested names is checked once it is loaded (training/lora.py).
"""

from pathlib import Path

from hybridrl.config.files import adapter_settings
from hybridrl.config.findings import Checker
from hybridrl.config.schema import ModelConfig, PPOConfig

ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM can reserve memory
ALL_LINEAR = ["all-linear"]
# What peft can do beyond a pair of matrices next to a linear layer -> the value at which it does not.
PLAIN = {
    "use_dora": False,
    "use_rslora": False,
    "lora_bias": False,
    "bias": "none",
    "rank_pattern": {},
    "alpha_pattern": {},
    "layer_replication": None,
    "target_parameters": None,
    "trainable_token_indices": None,
}


def resolve_lora(key: str, model: ModelConfig, check: Checker, *, served: bool) -> None:
    """Take rank, alpha and layers from the adapter if one is named; warn about settings without effect. `served`: a
    rollout engine computes with the model."""
    if model.lora_adapter_path and Path(model.lora_adapter_path).is_dir():  # otherwise it is on another machine
        _resolve_adapter(key, model, check)
    if model.lora_rank:
        if model.lora_alpha == 0:
            check.error(
                f"{key}.lora_alpha", "the adapter would have no weight", f"set {key}.lora_alpha={model.lora_rank}"
            )
        if model.lora.merge and not served:
            check.warn(f"{key}.lora.merge", "has no effect: no rollout engine computes with this model")
        return
    idle = {
        "lora_alpha": model.lora_alpha not in (0, 16),
        "target_modules": model.target_modules != ALL_LINEAR,
        "exclude_modules": bool(model.exclude_modules),
        "lora.merge": model.lora.merge,
        "lora.dropout": model.lora.dropout > 0,
    }
    for name in (name for name, is_set in idle.items() if is_set):
        check.warn((f"{key}.{name}", f"{key}.lora_rank"), f"has no effect without {key}.lora_rank")


def _resolve_adapter(key: str, model: ModelConfig, check: Checker) -> None:
    path = str(Path(model.lora_adapter_path or "").absolute())
    settings, adapter_key, rank_key = adapter_settings(path), f"{key}.lora_adapter_path", f"{key}.lora_rank"
    other = [name for name, plain in PLAIN.items() if settings.get(name, plain) not in (plain, None)]
    if other:
        check.error(
            adapter_key, f"it has {', '.join(other)}, and only plain LoRA can be trained", "merge it with peft first"
        )
    rank = int(settings["r"])
    if model.lora_rank not in (0, rank):
        check.error((rank_key, adapter_key), f"the adapter {path} has rank {rank}", f"set {rank_key}={rank}")
    layers = settings["target_modules"]
    model.lora_adapter_path, model.lora_rank, model.lora_alpha = path, rank, int(settings["lora_alpha"])
    model.target_modules = [layers] if isinstance(layers, str) else sorted(layers)
    model.exclude_modules = []
    layers = ", ".join(model.target_modules)
    check.warn(adapter_key, f"training continues with rank {rank} and lora_alpha {model.lora_alpha} on {layers}")
    base = settings.get("base_model_name_or_path")
    if base and base != str(Path(model.path).absolute()) and base != model.path:
        check.warn((adapter_key, f"{key}.path"), f"it was trained on {base}, and is applied to {model.path} here")


def check_lora_sync(config: PPOConfig, check: Checker) -> None:
    """Check how the policy's adapter reaches the rollout engine, and what it means for the reference."""
    section, key = config.actor_rollout_ref, "actor_rollout_ref"
    model, rank_key, refresh_key = section.model, f"{key}.model.lora_rank", f"{key}.ref.refresh_freq"
    options = [name for name in section.rollout.engine_kwargs.vllm if "lora" in name]
    if options:
        check.findings.error(
            "conflict",
            f"{key}.rollout.engine_kwargs.vllm: {', '.join(options)} follow from {rank_key}, which configures trainer "
            "and engine alike",
            "leave them out",
            keys=[f"{key}.rollout.engine_kwargs.vllm{name}" for name in ("", *(f".{option}" for option in options))],
        )
    if not model.lora_rank:
        return
    if not model.lora.merge and model.lora_rank > ENGINE_RANKS[-1]:
        check.error(
            rank_key,
            f"the rollout engine takes adapters up to rank {ENGINE_RANKS[-1]}",
            f"set {key}.model.lora.merge=true, which syncs merged weights",
        )
    if section.ref.refresh_freq > 0:
        check.error(
            (refresh_key, rank_key),
            "with LoRA the reference is the model without its adapter, and cannot become a copy of the policy",
            f"set {refresh_key}=-1",
        )

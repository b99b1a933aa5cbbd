"""Which settings of LoRA cannot work, and which change nothing as the others are.

Whether the model has layers of the names that are asked for is seen once it is known (training/lora.py).
"""

from collections.abc import Callable
from pathlib import Path

from hybridrl.config.error import Refusals
from hybridrl.config.model_directory import adapter_settings
from hybridrl.config.schema import ModelConfig, PPOConfig

Note = Callable[[str], None]

ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM can set memory aside
ALL_LINEAR = ["all-linear"]
# What peft may do beyond a pair of matrices beside a linear layer -> what it is where it does not.
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


def settle_lora(key: str, model: ModelConfig, note: Note, wrong: Refusals) -> None:
    """Take rank, alpha and layers from the adapter where one is named; say what has no effect without LoRA."""
    if model.lora_adapter_path and Path(model.lora_adapter_path).is_dir():  # else it is on another machine
        _settle_adapter(key, model, note, wrong)
    if model.lora_rank:
        if model.lora_alpha == 0:
            wrong.add(
                f"{key}.lora_alpha=0: the adapter would count for nothing; set {key}.lora_alpha={model.lora_rank}"
            )
        return
    idle = {
        "lora_alpha": model.lora_alpha not in (0, 16),
        "target_modules": model.target_modules != ALL_LINEAR,
        "exclude_modules": bool(model.exclude_modules),
        "lora.merge": model.lora.merge,
        "lora.dropout": model.lora.dropout > 0,
    }
    for name in (name for name, is_set in idle.items() if is_set):
        note(f"{key}.{name} has no effect without {key}.lora_rank")


def _settle_adapter(key: str, model: ModelConfig, note: Note, wrong: Refusals) -> None:
    path = str(Path(model.lora_adapter_path or "").absolute())
    found, asked = adapter_settings(path), f"{key}.lora_adapter_path={model.lora_adapter_path}"
    further = [name for name, plain in PLAIN.items() if found.get(name, plain) not in (plain, None)]
    if further:
        wrong.add(
            f"{asked}: it has {', '.join(further)}, and plain LoRA alone can be trained; merge it with peft first"
        )
    rank = int(found["r"])
    if model.lora_rank not in (0, rank):
        wrong.add(f"{key}.lora_rank={model.lora_rank}: the adapter {path} has rank {rank}; set {key}.lora_rank={rank}")
    layers = found["target_modules"]
    model.lora_adapter_path, model.lora_rank, model.lora_alpha = path, rank, int(found["lora_alpha"])
    model.target_modules = [layers] if isinstance(layers, str) else sorted(layers)
    model.exclude_modules = []
    note(f"{asked}: goes on with rank {rank} and lora_alpha {model.lora_alpha} on {', '.join(model.target_modules)}")
    base = found.get("base_model_name_or_path")
    if base and base != str(Path(model.path).absolute()) and base != model.path:
        note(f"{asked}: it was trained on {base}, and is put on {model.path} here")


def check_hand_over(config: PPOConfig, wrong: Refusals) -> None:
    """How the policy's adapter reaches the rollout engine, and what it has to do with the reference."""
    section = config.actor_rollout_ref
    model, rollout, key = section.model, section.rollout, "actor_rollout_ref"
    own = [name for name in rollout.engine_kwargs.vllm if "lora" in name]
    if own:
        wrong.add(
            f"{key}.rollout.engine_kwargs.vllm: {', '.join(own)} follow from {key}.model.lora_rank, which sets up "
            "trainer and engine alike; leave them out"
        )
    if not model.lora_rank:
        return
    if not model.lora.merge and model.lora_rank > ENGINE_RANKS[-1]:
        wrong.add(
            f"{key}.model.lora_rank={model.lora_rank}: the rollout engine takes adapters up to rank "
            f"{ENGINE_RANKS[-1]}; set {key}.model.lora.merge=true, which hands over merged weights"
        )
    if section.ref.refresh_freq > 0:
        wrong.add(
            f"{key}.ref.refresh_freq={section.ref.refresh_freq}: with LoRA the reference is the model without its "
            f"adapter, and cannot become a copy of the policy; set {key}.ref.refresh_freq=-1"
        )


def note_no_hand_over(key: str, model: ModelConfig, note: Note) -> None:
    """For a model that no engine computes with."""
    if model.lora_rank and model.lora.merge:
        note(f"{key}.lora.merge has no effect: no rollout engine computes with this model")

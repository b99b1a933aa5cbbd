"""Whether a model can be trained as it is asked for, told by its config.json, and which of its values are changed."""

import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hybridrl.config.error import Refusals
from hybridrl.config.families import (
    disturbances,
    has_delta_rule,
    implied_values,
    is_recurrent,
    why_name_unsupported,
    why_not_served,
    why_unsupported,
)
from hybridrl.config.model_directory import resolve_model
from hybridrl.config.schema import FSDPConfig, ModelConfig, RolloutConfig

Note = Callable[[str], None]

ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
SURE_IN_BFLOAT16 = 1e-3  # a learning rate at which most elements move (84% measured)
# Head sizes that vLLM's attention on CPU computes with (CPUAttentionBackend.get_supported_head_sizes).
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
AUXILIARY_LOSS = ("output_router_logits", "router_aux_loss_coef")


def check_model(key: str, model: ModelConfig, longest: int, way_out: str, note: Note, wrong: Refusals) -> None:
    """Settle what `override_config` changes; judge whether a local model can be trained and takes the longest sequence.
    Paths are made absolute, as the workers of a Ray that was joined run elsewhere."""
    settings = _settings(model)
    model.override_config = implied_values(settings) | _overrides(key, model.override_config, settings, note, wrong)
    for name, value in disturbances(settings).items():
        if name not in model.override_config:
            note(f"{key}: {name}={value} of config.json is off; to have it, set {key}.override_config.{name}={value}")
    settings |= model.override_config
    reason = why_unsupported(settings) if settings else why_name_unsupported(model.path)
    if reason:
        wrong.add(f"{key}.path={model.path}: {reason}")
    if settings.get("auto_map") and not model.trust_remote_code and not has_model_code(settings.get("model_type")):
        wrong.add(
            f"{key}.path={model.path}: its config.json names Python files of the model (auto_map), which run only if "
            f"they are trusted; read them, then set {key}.trust_remote_code=true"
        )
    limit = settings.get("max_position_embeddings")
    rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    if limit is not None and "factor" not in rope and longest > limit:  # a factor stretches the limit
        wrong.add(f"{key}.path={model.path}: the model takes {limit} positions, a row may have {longest}; {way_out}")
    model.path = absolute(model.path)
    model.external_lib = [absolute(name) for name in model.external_lib]


def check_recomputation(
    key: str, model: ModelConfig, fsdp_key: str, fsdp: FSDPConfig, device: str, note: Note, wrong: Refusals
) -> None:
    """Judge together what a layer recomputes and whether it is compiled."""
    if fsdp.compile_layers and device == "cpu":
        note(f"{fsdp_key}.compile_layers=true has no effect on CPU, where compiled layers make updates no faster")
        fsdp.compile_layers = False
    selective = model.selective_checkpointing
    if selective and not model.enable_gradient_checkpointing:
        note(f"{key}.selective_checkpointing=true has no effect with enable_gradient_checkpointing=false")
    elif selective and fsdp.compile_layers:
        wrong.add(
            f"{key}.selective_checkpointing=true: the operations of compiled layers cannot be chosen one by one; set "
            f"{key}.enable_gradient_checkpointing=false (compiled layers recompute what is cheap by themselves), or "
            f"{fsdp_key}.compile_layers=false"
        )


def note_small_updates(key: str, fsdp: FSDPConfig, lr: float, note: Note) -> None:
    """bfloat16 has 8 significant bits: an update below a 512th of an element never changes it. Shares of elements that
    still move: scripts/benchmark/bfloat16_updates.py."""
    if fsdp.model_dtype == "bfloat16" and 0 < lr < SURE_IN_BFLOAT16:
        note(
            f"{key}.model_dtype=bf16 with optim.lr={lr:g}: parameters in bfloat16 lose small updates, as an element "
            f"larger than 512 times its update stays what it is, at this lr each above {512 * lr:.1e}. At an lr of "
            "1e-6 an update of AdamW was measured to change 0.3% of the elements of normal weights, at 1e-4 25%; set "
            f"{key}.model_dtype=fp32, float32 masters of a computation in {fsdp.dtype}"
        )


def check_sequence_parallel(
    key: str, fsdp: FSDPConfig, model_key: str, model: ModelConfig, devices: int, wrong: Refusals
) -> None:
    """Judge whether as many devices can share a row of this model as are to."""
    size = fsdp.ulysses_sequence_parallel_size
    if size == 1:
        return
    settings, asked = _settings(model) | model.override_config, f"{key}.ulysses_sequence_parallel_size={size}"
    heads = settings.get("num_attention_heads") or settings.get("n_head") or 0  # unknown of a model of the hub
    if devices % size or heads % size:
        fitting = max(number for number in range(1, size) if devices % number == heads % number == 0)
        also = f" and the {heads} attention heads of {model_key}.path={model.path}" if heads else ""
        wrong.add(f"{asked}: must divide the {devices} devices{also}; set {fitting}")
    if not model.use_remove_padding:
        wrong.add(f"{asked}: only rows that lie in one line can be shared; set {model_key}.use_remove_padding=true")


def check_head_size(key: str, model: ModelConfig, wrong: Refusals) -> None:
    """Judge whether vLLM on CPU can compute the model's attention; one with latent attention has another backend."""
    settings = _settings(model) | model.override_config
    heads, width = settings.get("num_attention_heads"), settings.get("hidden_size")
    size = settings.get("head_dim") or (width // heads if heads and width else None)
    if size and not settings.get("kv_lora_rank") and size not in CPU_HEAD_SIZES:
        wrong.add(
            f"{key}.path={model.path}: its attention heads have size {size}, and vLLM on CPU computes with "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}; take another model, or a GPU"
        )


def has_model_code(kind: str | None) -> bool:
    """Whether transformers itself has this type of model; found without importing it, which takes seconds."""
    spec = find_spec("transformers")
    root = Path(spec.origin).parent if spec and spec.origin else None
    return bool(root and kind and (root / "models" / kind.replace("-", "_")).is_dir())


def check_served(key: str, model: ModelConfig, wrong: Refusals) -> None:
    """Refuse a policy whose weights an engine cannot take."""
    if reason := why_not_served(_settings(model)):
        wrong.add(f"{key}.path={model.path}: {reason}")


def settle_recurrence(
    key: str, model: ModelConfig, rollout: RolloutConfig, asked: str | None, note: Note, wrong: Refusals
) -> None:
    """Give an engine on CPU what vLLM's build needs for layers that carry a state along the text; `asked` is the type
    that was set for it, if any."""
    settings = _settings(model)
    if is_recurrent(settings) and rollout.enable_prefix_caching:
        rollout.enable_prefix_caching = False
        note(f"{key}.enable_prefix_caching is off: on CPU no state is kept of the beginnings of prompts")
    if not has_delta_rule(settings):
        return
    if asked is None:
        rollout.dtype = "bfloat16"
        note(f"{key}.dtype is bfloat16: in no other type vLLM computes this model's linear attention on CPU")
    elif rollout.dtype != "bfloat16":
        wrong.add(f"{key}.dtype={asked}: on CPU vLLM computes its linear attention in bfloat16 alone; set bf16")
    if model.lora_rank and not model.lora.merge:
        model.lora.merge = True
        note("actor_rollout_ref.model.lora.merge is on: on CPU vLLM has no adapters for this model's linear attention")


def _settings(model: ModelConfig) -> dict[str, Any]:
    """A local model's config.json; empty for a model of the hub."""
    file = resolve_model(model.path) / "config.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def absolute(path: str) -> str:
    """A directory's or file's path as workers elsewhere find it; any other name unchanged."""
    return str(Path(path).absolute()) if Path(path).exists() else path


def _overrides(
    key: str, asked: dict[str, Any], settings: dict[str, Any], note: Note, wrong: Refusals
) -> dict[str, Any]:
    """Values to change in config.json, each whole: of a nested one the rest stays."""
    key, asked = f"{key}.override_config", dict(asked)
    asked |= asked.pop("model_config", None) or {}
    attention = asked.pop("attn_implementation", None)
    own = "the trainer has its own, for rows that lie in one line"
    if attention in ATTENTION:
        note(f"{key}.attn_implementation={attention} has no effect: {own}")
    elif attention is not None:
        wrong.add(f"{key}.attn_implementation={attention}: there is no such attention; leave it out, {own}")
    if any(dict(asked.pop("moe_config", None) or {}).values()):
        wrong.add(f"{key}.moe_config: routers cannot be frozen yet; leave it out, all weights are trained")
    for name in AUXILIARY_LOSS:
        if asked.pop(name, None):
            note(f"{key}.{name} has no effect: routers are trained by the policy's loss alone")
    changes = {name: _merged(settings.get(name), value) for name, value in asked.items()}
    return _rope(changes, settings)


def _merged(old: Any, new: Any) -> Any:
    return {**old, **new} if isinstance(old, Mapping) and isinstance(new, Mapping) else new


def _rope(changes: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings as transformers 5 reads them, all in one place: in their old places they would be overlooked."""
    scaling, theta = changes.pop("rope_scaling", None), changes.pop("rope_theta", None)
    if scaling is None and theta is None:
        return changes
    old, new = dict(settings.get("rope_parameters") or settings.get("rope_scaling") or {}), dict(scaling or {})
    for told in (old, new):
        if "type" in told:
            told["rope_type"] = told.pop("type")
    bases = [base for base in (theta, old.get("rope_theta"), settings.get("rope_theta")) if base]
    found = {"rope_type": "default", **old, **new}
    return changes | {"rope_parameters": {**found, "rope_theta": bases[0]} if bases else found}

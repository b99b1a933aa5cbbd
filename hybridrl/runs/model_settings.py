"""Checks of a model's settings that need transformers: settings of the hub, and every value in override_config.

A name that neither the family nor the model's config.json has would be saved with the model and read by nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hybridrl.config import ConfigError
from hybridrl.config.catalog import RANDOM, why_unsupported
from hybridrl.config.checks.model import IMPLIED, why_not_served
from hybridrl.config.custom_code import attempt
from hybridrl.config.files import resolve_model
from hybridrl.config.findings import nearest
from hybridrl.config.schema import ModelConfig

ROPE = "rope_parameters"
ROPE_TYPES = ["default", *ROPE_INIT_FUNCTIONS]
# What the types of rotary embeddings read.
ROPE_SETTINGS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "mrope_section", "mrope_interleaved"),
}


def reject_hub_model(model: ModelConfig, key: str, served: int = 0) -> None:
    """Reject a hub model that is missing or cannot be trained, or served with rows of `served` tokens; a local one was
    checked with the configuration."""
    if resolve_model(model.path).is_dir():
        return
    try:
        settings = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code).to_dict()
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{key}={model.path} is neither a directory nor a model that the hub provides ({reason})"
        ) from error
    settings |= model.override_config
    if reason := why_unsupported(settings) or (why_not_served(settings, served) if served else None):
        raise ConfigError(f"{key}={model.path}: {reason}")


def reject_unusable_overrides(model: ModelConfig, key: str) -> None:
    """Reject names in `override_config` that neither the model's family nor its config.json has, and values that the
    family cannot take."""
    path, changes = str(resolve_model(model.path)), model.override_config
    if not changes:
        return
    read = partial(AutoConfig.from_pretrained, path, trust_remote_code=model.trust_remote_code)
    try:
        plain, (written, _) = read(), PreTrainedConfig.get_config_dict(path)
    except (OSError, ValueError):
        return  # reported with the model
    causes = list(_unknown(changes, plain, written, key))
    if not causes and (error := _fault(read, changes)) and not _fault(read, {}):
        alone = next((name for name in changes if _fault(read, {name: changes[name]})), None)
        per_layer = alone == "num_hidden_layers" and getattr(plain, "layer_types", None)
        fix = f"; set {key}.layer_types too" if per_layer else ""
        causes = [f"{key}.{alone or ', '.join(changes)}: {_reason(error)}{fix}"]
    if causes:
        raise ConfigError(*causes)


def _unknown(
    changes: Mapping[str, Any], plain: PreTrainedConfig, written: Mapping[str, Any], key: str
) -> Iterator[str]:
    """Describe the names that are not known, also nested ones. `plain` has the family's settings, `written` are those
    of config.json."""
    implied = IMPLIED.get(plain.model_type, {})
    for name, value in changes.items():
        own = getattr(plain, name, None)
        if name == ROPE and isinstance(value, Mapping):
            yield from _unknown_rope(value, written.get(ROPE) or written.get("rope_scaling") or {}, f"{key}.{name}")
        elif isinstance(own, PreTrainedConfig) and isinstance(value, Mapping):
            yield from _unknown(value, own, written.get(name) or {}, f"{key}.{name}")
        elif not (hasattr(plain, name) or name in written or name in implied or _is_no_noise(name, value)):
            known = {*plain.to_dict(), *written, "rope_scaling", "rope_theta"}
            cause = f"{key}.{name}: neither models of type {plain.model_type} nor its config.json have such a setting"
            yield f"{cause}; {_nearest(name, known)}"


def _unknown_rope(values: Mapping[str, Any], written: Mapping[str, Any], key: str) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping) and name not in ROPE_SETTINGS:  # those of one type of layers
            yield from _unknown_rope(value, written.get(name) or {}, f"{key}.{name}")
        elif name not in ROPE_SETTINGS and name not in written:
            yield f"{key}.{name}: no type of rotary embeddings has such a setting; {_nearest(name, ROPE_SETTINGS)}"
        elif name in ("rope_type", "type") and value not in (*ROPE_TYPES, written.get(name)):
            yield f"{key}.{name}={value}: there is no such type; {_nearest(str(value), set(ROPE_TYPES))}"


def _is_no_noise(name: str, value: Any) -> bool:
    """Whether it turns off dropout, of a kind that the family may not have."""
    return bool(RANDOM.search(name)) and not value


def _nearest(name: str, known: set[str]) -> str:
    near = nearest(name, sorted(known))
    return f"did you mean {' or '.join(near)}?" if near else "leave it out, or add it to config.json"


def _fault(read: Callable[..., PreTrainedConfig], changes: Mapping[str, Any]) -> Exception | None:
    """Return what is raised where the changed settings are read, written and read again, and rotate positions."""

    def used() -> None:
        settings = read(**changes)
        settings = type(settings).from_dict(settings.to_dict())  # which validates them
        rope = getattr(settings, ROPE, None) or {}
        if rotary := ROPE_INIT_FUNCTIONS.get(str(rope.get("rope_type"))):
            rotary(settings, torch.device("cpu"))

    return attempt(used)


def _reason(error: Exception) -> str:
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return " ".join(text.split()) or type(error).__name__

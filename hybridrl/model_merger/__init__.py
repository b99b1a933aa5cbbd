"""Merge saved shards into a Hugging Face directory and verify it. `hybridrl merge --help`"""

from pathlib import Path

from hybridrl.config import ConfigError
from hybridrl.config.files import ADAPTER_CONFIG, adapter_settings, holds_adapter, is_sharded
from hybridrl.tracking.console import warn


def base_model(path: str, key: str) -> str:
    """Return the base model of a LoRA adapter, or the path of a model that is none. Raises ConfigError, for `key`, if
    the adapter's settings cannot be read."""
    if not holds_adapter(path):
        return path
    try:
        return adapter_settings(path).get("base_model_name_or_path") or path
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{key}={path}: {ADAPTER_CONFIG} cannot be read: {error}") from error


def whole_model(path: str, directory: Path, key: str) -> str:
    """Return the Hugging Face directory of a model: `path` itself, or for shards and adapters a merge of them in
    `directory`. The merger rejects an untrained adapter: its base is returned. Raises ConfigError if the model cannot
    be merged; `key` is the setting that names it."""
    from hybridrl.checkpoint.read import open_adapter
    from hybridrl.model_merger.__main__ import main

    if not (is_sharded(path) or holds_adapter(path)):
        return path
    base = base_model(path, key)
    if base != path:
        tensors = open_adapter(Path(path)).tensors
        if not any(tensors.read(name).any() for name in tensors.meta if "lora_A" not in name):
            warn(f"{key}={path}: the adapter has not been trained yet (its B is zero), so its base is used")
            return whole_model(base, directory, key)
    target = directory / "merged"
    if main(["merge", "--local_dir", path, "--target_dir", str(target)]):
        raise ConfigError(f"{key}={path} cannot be merged", fix="see the message above")
    return str(target)

"""Where a model's files lie: all in one directory, as Hugging Face has it, or in a folder of a saved step, such as
.../global_step_N/actor: the weights in shards there (ours or verl's), all else in `huggingface/` below it."""

import json
from pathlib import Path
from typing import Any

HUGGINGFACE = "huggingface"
SHARDS = ".metadata"  # the file in which torch.distributed.checkpoint says what is in a directory
VERL_SHARDS = "model_world_size_*_rank_*.pt"
ADAPTER_CONFIG = "adapter_config.json"  # peft's, of a LoRA adapter


def resolve_model(path: str) -> Path:
    """The directory with a model's configuration, tokenizer and, unless it `is_sharded`, weights; a hub's name is
    returned as it is."""
    directory, below = Path(path), Path(path, HUGGINGFACE)
    return below if below.is_dir() and not (directory / "config.json").is_file() else directory


def is_sharded(path: str) -> bool:
    """Whether the weights lie in shards."""
    return any(True for pattern in (SHARDS, VERL_SHARDS) for _ in Path(path).glob(pattern))


def holds_adapter(path: str) -> bool:
    """Whether it is a LoRA adapter that lies there: peft's directory, or a saved step of training through one."""
    return (resolve_model(path) / ADAPTER_CONFIG).is_file()


def adapter_settings(path: str) -> dict[str, Any]:
    """What peft's adapter_config.json says. Raises OSError or ValueError where it cannot be read."""
    return json.loads((resolve_model(path) / ADAPTER_CONFIG).read_text(encoding="utf-8"))

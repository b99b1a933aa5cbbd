"""Where a model's files lie: all in one directory, as Hugging Face has it, or in a folder of a saved step, such as
.../global_step_N/actor: the weights in shards there (ours or verl's), all else in `huggingface/` below it."""

from pathlib import Path

HUGGINGFACE = "huggingface"
SHARDS = ".metadata"  # the file in which torch.distributed.checkpoint says what is in a directory
VERL_SHARDS = "model_world_size_*_rank_*.pt"


def resolve_model(path: str) -> Path:
    """The directory with a model's configuration, tokenizer and, unless it `is_sharded`, weights; a hub's name is
    returned as it is."""
    directory, below = Path(path), Path(path, HUGGINGFACE)
    return below if below.is_dir() and not (directory / "config.json").is_file() else directory


def is_sharded(path: str) -> bool:
    """Whether the weights lie in shards."""
    return any(True for pattern in (SHARDS, VERL_SHARDS) for _ in Path(path).glob(pattern))

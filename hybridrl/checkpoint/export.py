"""A model as a Hugging Face directory, written tensor by tensor: at most one shard is in memory beside the model."""

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

SHARD_BYTES = 5 << 30


def export_model(
    tensors: Iterable[tuple[str, Tensor]],
    model: PreTrainedModel,
    directory: Path,
    dtype: torch.dtype,
    *,
    writes: bool,
) -> None:
    """Write config, generation config and weights of this type. `tensors` is walked through even where nothing is
    written, since gathering them is a collective of all ranks."""
    if writes:
        directory.mkdir(parents=True, exist_ok=True)
        config = type(model.config).from_dict(model.config.to_dict())
        config.dtype = dtype
        config.save_pretrained(directory)
        if model.can_generate() and model.generation_config is not None:
            # As it came: `save_pretrained` refuses the combinations of settings that some published models have.
            model.generation_config.to_json_file(directory / GENERATION_CONFIG_NAME)
    sizes = {name: math.prod(p.shape) * dtype.itemsize for name, p in model.named_parameters()}
    files = shard_names(sizes, SHARD_BYTES)
    shard: dict[str, Tensor] = {}
    names = list(files)
    for index, (name, tensor) in enumerate(tensors):
        if not writes:
            continue
        shard[name] = tensor.to("cpu", dtype).contiguous()
        if index + 1 == len(names) or files[names[index + 1]] != files[name]:
            save_file(shard, directory / files[name], metadata={"format": "pt"})
            shard = {}
    if writes and len(set(files.values())) > 1:
        index_file = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": files}
        (directory / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index_file, indent=2))


def shard_names(sizes: dict[str, int], limit: int) -> dict[str, str]:
    """The file that each tensor goes to, in order: files of at most `limit` bytes, one tensor at least."""
    number, used, shards = 0, 0, {}
    for name, size in sizes.items():
        if used and used + size > limit:
            number, used = number + 1, 0
        used += size
        shards[name] = number
    if number == 0:
        return {name: SAFE_WEIGHTS_NAME for name in shards}
    return {name: f"model-{shard + 1:05}-of-{number + 1:05}.safetensors" for name, shard in shards.items()}


def publish(written: Path, final: Path) -> None:
    """Make a finished file or directory appear under its name at once: it first reaches the disk, then one rename."""
    for path in (*written.rglob("*"), written):
        _reach_disk(path)
    written.replace(final)
    _reach_disk(final.parent)


def _reach_disk(path: Path) -> None:
    """Wait until a file's bytes, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)

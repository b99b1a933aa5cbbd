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
        if model.generation_config is not None:
            model.generation_config.save_pretrained(directory)
    files = shard_names([(name, math.prod(p.shape) * dtype.itemsize) for name, p in model.named_parameters()])
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
        sizes = sum(math.prod(p.shape) * dtype.itemsize for p in model.parameters())
        index_file = {"metadata": {"total_size": sizes}, "weight_map": files}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index_file, indent=2))


def shard_names(sizes: list[tuple[str, int]], limit: int = SHARD_BYTES) -> dict[str, str]:
    """The file that each tensor goes to, in order: files of at most `limit` bytes, one tensor at least."""
    number, used, shards = 0, 0, {}
    for name, size in sizes:
        if used and used + size > limit:
            number, used = number + 1, 0
        used += size
        shards[name] = number
    if number == 0:
        return {name: "model.safetensors" for name in shards}
    return {name: f"model-{shard + 1:05}-of-{number + 1:05}.safetensors" for name, shard in shards.items()}


def publish(written: Path, final: Path) -> None:
    """Make a finished directory appear under its name at once: its data first reach the disk, then one rename."""
    for file in written.rglob("*"):
        if file.is_file():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
    written.rename(final)
    parent = os.open(final.parent, os.O_RDONLY)
    os.fsync(parent)
    os.close(parent)

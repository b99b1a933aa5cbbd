"""A model as a Hugging Face directory, written tensor by tensor: at most one tensor is in memory beside the model."""

import json
import struct
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hybridrl.checkpoint.tensors import TYPES, blank

SHARD_BYTES = 5 << 30
# At once, straight from a tensor's memory: Linux 6 took 1.0 s for 2 GB in writes of many MB, and 0.6 s in these.
WRITE_BYTES = 1 << 20


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
        export_settings(model, directory, dtype)
    meta = {name: blank(p.shape, dtype) for name, p in model.named_parameters()}
    if writes:
        write_shards(directory, meta, ((name, 0, tensor.to("cpu", dtype)) for name, tensor in tensors), SHARD_BYTES)
    else:
        for _ in tensors:
            pass


def write_shards(
    directory: Path, meta: dict[str, Tensor], pieces: Iterable[tuple[str, int, Tensor]], limit: int
) -> dict[str, str]:
    """Write tensors to safetensors files of at most `limit` bytes, and an index where there are several. They come
    whole or in pieces, in any order: a name, the number of the first element, and it with those that follow. `meta` has
    names in the order of the files, shapes and types. Returns each one's file."""
    files = shard_names({name: tensor.nbytes for name, tensor in meta.items()}, limit)
    starts: dict[str, int] = {}
    for file in dict.fromkeys(files.values()):
        starts |= _write_header(directory / file, {name: meta[name] for name in meta if files[name] == file})
    missing = {name: tensor.numel() for name, tensor in meta.items()}
    for name, first, piece in pieces:
        assert piece.dtype == meta[name].dtype, name
        with (directory / files[name]).open("r+b") as file:
            file.seek(starts[name] + first * piece.itemsize)
            content = memoryview(piece.contiguous().reshape(-1).view(torch.uint8).numpy())
            for begin in range(0, len(content), WRITE_BYTES):
                file.write(content[begin : begin + WRITE_BYTES])
        missing[name] -= piece.numel()
    assert not any(missing.values()), f"{sum(map(bool, missing.values()))} tensors were not written"
    if len(set(files.values())) > 1:
        index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in meta.values())}, "weight_map": files}
        (directory / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2))
    return files


def _write_header(file: Path, meta: dict[str, Tensor]) -> dict[str, int]:
    """Begin a safetensors file: eight bytes for the header's length, the header, then the tensors without gaps.
    Returns at which byte of the file each of them begins."""
    header: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
    begins, end = {}, 0
    # The widest types first, so that each tensor begins at a multiple of its type's width.
    for name, tensor in sorted(meta.items(), key=lambda item: -item[1].itemsize):
        begins[name], end = end, end + tensor.nbytes
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begins[name], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    return {name: 8 + len(text) + begin for name, begin in begins.items()}


def export_settings(model: PreTrainedModel, directory: Path, dtype: torch.dtype) -> None:
    """Write config and generation config, for weights of this type."""
    directory.mkdir(parents=True, exist_ok=True)
    config = type(model.config).from_dict(model.config.to_dict())
    config.dtype = dtype
    config.save_pretrained(directory)
    if model.can_generate() and model.generation_config is not None:
        # As it came: `save_pretrained` refuses the combinations of settings that some published models have.
        model.generation_config.to_json_file(directory / GENERATION_CONFIG_NAME)


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

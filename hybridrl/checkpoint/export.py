"""Write models as Hugging Face directories, with the tensor names of published checkpoints, for other software.

These names differ from the model's own if transformers fuses several tensors of a checkpoint into one, such as the
experts of a layer. The conversions are reverted here, one `Part` of the model at a time.

A safetensors file is an 8-byte length, a JSON header of that length, and the bytes of the tensors without gaps. The
header needs only names, shapes and types, so it is written first. Each piece of a tensor is then written to its place
in the file as it arrives. No memory is needed beyond the piece.
"""

import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Transpose, revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hybridrl.checkpoint.files import forget_missing_code, preallocate, start_writeback
from hybridrl.checkpoint.tensors import TYPES, Chunk, Tensors, blank

LAYER = re.compile(r"(.*?\.\d+\.)?")  # prefix of a name up to its first number; empty outside the layers
SHARD_BYTES = 5 << 30
# Bytes rounded at once: they stay in the processor's cache.
ROUNDED_BYTES = 1 << 20
# Bytes per write call. Linux needs contiguous memory for each call: writing 1 GB took 0.2 s of CPU time with this size,
# 0.9 s with 1 MiB on fragmented memory, and 1.5 s with 16 MiB on memory that was not fragmented.
WRITE_BYTES = 128 << 10
# Writeback starts for this many bytes at once. 2 GB were on disk after 0.6 s, against 0.9 s with one flush at the end.
WRITEBACK_BYTES = 64 << 20


@dataclass(frozen=True)
class Part:
    """Tensors of a model by `names`, and the `published` tensors: names, shapes and types, as meta tensors."""

    names: tuple[str, ...]
    published: dict[str, Tensor]
    converted: bool = False  # whether names, shapes or the order of values differ from the model's

    def publish(self, model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert the tensors of this part to tensors of a published checkpoint."""
        if not self.converted:
            return dict(tensors)
        return published(model, dict(tensors))


class TransposeExperts(Transpose):
    """The experts of Qwen3-VL-MoE, which are transposed in published files. transformers (5.19) compares shapes alone:
    it does not transpose them back, and never where the layers are square."""

    def convert(self, input_dict: dict[str, Any], **options: Any) -> dict[str, Tensor]:
        """Transpose unless the file has the model's shape, as transformers itself saves it, or if both are square."""
        tensor = next(iter(input_dict.values()))
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        name = self.get_target_pattern(input_dict, options["source_patterns"], options["target_patterns"])
        ours = options["model"].get_parameter(options["full_layer_name"]).shape[1:]
        as_saved = tensor.shape[1:] == ours and ours[0] != ours[1]
        return {name: tensor if as_saved else tensor.transpose(1, 2).contiguous()}

    @property
    def reverse_op(self) -> Transpose:
        return Transpose(1, 2)


def conversions(model: PreTrainedModel, **options: Any) -> list[Any]:
    """Return transformers' conversions from published names and shapes to the model's."""
    mapping = get_model_conversion_mapping(model, **options)
    for conversion in mapping:
        operations = getattr(conversion, "operations", ())
        if any(isinstance(operation, Transpose) and operation.check_dims for operation in operations):
            conversion.operations = [TransposeExperts(1, 2)]
    return mapping


def published(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors of a model to those of a published checkpoint, in the family's standard form."""
    mapping = conversions(model, add_legacy=False)
    # The change of a prefix is one of the file that was read; None: no conversion.
    model._weight_conversions = [each for each in mapping if type(each).__name__ != "PrefixChange"] or None
    try:
        return revert_weight_conversion(model, tensors)
    finally:
        model._weight_conversions = None


def own_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return every tensor that a checkpoint must hold, once: parameters, then persistent buffers."""
    computed = {name for name, _ in model.named_non_persistent_buffers()}
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in computed}
    return dict(model.named_parameters()) | buffers


def parts(model: PreTrainedModel, dtype: torch.dtype | None = None) -> list[Part]:
    """Return the parts of a model, layer by layer, with parameters in `dtype` or in their own type."""
    own = {
        name: blank(tensor.shape, dtype if dtype and isinstance(tensor, torch.nn.Parameter) else tensor.dtype)
        for name, tensor in own_tensors(model).items()
    }
    result = []
    for _, names in groupby(own, lambda name: LAYER.match(name)[0]):
        group = {name: own[name] for name in names}
        converted = published(model, group)
        same = [name for name in group if converted.get(name) is group[name]]
        result += [Part((name,), {name: group[name]}) for name in same]
        if others := tuple(name for name in group if name not in same):
            result.append(Part(others, {name: converted[name] for name in converted if name not in same}, True))
    return result


def as_published(saved: Tensors, model: PreTrainedModel) -> Tensors:
    """Present tensors saved under the model's own names as published tensors."""
    converted = {
        name: part
        for part in parts(model)
        if part.converted and saved.meta.keys() >= set(part.names)
        for name in part.published
    }
    if not converted:
        return saved
    used = {name for part in converted.values() for name in part.names}
    meta = {name: tensor for name, tensor in saved.meta.items() if name not in used}
    meta |= {name: part.published[name].to(saved.meta[part.names[0]].dtype) for name, part in converted.items()}

    @lru_cache(maxsize=1)  # the tensors of one part are read one after another
    def converted_part(names: tuple[str, ...]) -> dict[str, Tensor]:
        return published(model, {name: saved.read(name) for name in names})

    def chunks(name: str) -> Iterable[Chunk]:
        if name not in converted:
            return saved.chunks(name)
        return [([0] * meta[name].dim(), converted_part(converted[name].names)[name])]

    return replace(saved, meta=meta, chunks=chunks)


def export_model(
    tensors: Iterable[tuple[str, Tensor]],
    model: PreTrainedModel,
    directory: Path,
    dtype: torch.dtype,
    *,
    writes: bool,
    limit: int = SHARD_BYTES,
) -> None:
    """Write config, generation config and the weights, in this type. `tensors` is exhausted even on ranks that write
    nothing or fail: gathering them is a collective."""
    tensors = iter(tensors)
    try:
        if writes:
            export_settings(model, directory, dtype)
            meta = {name: tensor for part in parts(model, dtype) for name, tensor in part.published.items()}
            write_shards(directory, meta, ((name, 0, tensor.cpu()) for name, tensor in tensors), limit)
    finally:
        for _ in tensors:
            pass


def export_settings(model: PreTrainedModel, directory: Path, dtype: torch.dtype) -> None:
    """Write config and generation config for weights of this type, and the model's custom code."""
    directory.mkdir(parents=True, exist_ok=True)
    config = type(model.config).from_dict(model.config.to_dict())
    config.dtype = dtype
    if model.is_remote_code():  # saving the config alone would omit the model's code
        custom_object_save(model, directory, config=config)
    config.save_pretrained(directory)
    forget_missing_code(directory)
    if model.can_generate() and model.generation_config is not None:
        # Written unchanged: `save_pretrained` rejects combinations of settings that some published models have.
        model.generation_config.to_json_file(directory / GENERATION_CONFIG_NAME)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: for pieces of a few MiB, waking further threads doubles the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def write_shards(
    directory: Path, meta: dict[str, Tensor], pieces: Iterable[tuple[str, int, Tensor]], limit: int = SHARD_BYTES
) -> dict[str, str]:
    """Write tensors to safetensors files of at most `limit` bytes, with an index if there are several files. `meta` has
    names, in the order of the files, with shapes and types. `pieces` come in any order: a name, the index of the first
    element, and the values from there on, which are rounded to the type in `meta`. Returns the file of each tensor.
    Raises OSError before anything is written if the disk has no room."""
    shards = shard_names({name: tensor.nbytes for name, tensor in meta.items()}, limit)
    with ExitStack() as stack:
        files = {}
        for shard in dict.fromkeys(shards.values()):
            tensors = {name: tensor for name, tensor in meta.items() if shards[name] == shard}
            files[shard] = _File(directory / shard, tensors)
            stack.callback(files[shard].file.close)
        for name, first, piece in pieces:
            files[shards[name]].write(name, first, piece)
    incomplete = [name for file in files.values() for name, missing in file.missing.items() if missing]
    assert not incomplete, f"{len(incomplete)} tensors were not written exactly once: {', '.join(incomplete[:3])}"
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in meta.values())}, "weight_map": shards}
        (directory / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2))
    return shards


def shard_names(sizes: dict[str, int], limit: int) -> dict[str, str]:
    """Assign tensors in order to files of at most `limit` bytes, or of one larger tensor; return each one's file."""
    number, used, shards = 0, 0, {}
    for name, size in sizes.items():
        if used and used + size > limit:
            number, used = number + 1, 0
        used += size
        shards[name] = number
    if number == 0:
        return {name: SAFE_WEIGHTS_NAME for name in shards}
    return {name: f"model-{shard + 1:05}-of-{number + 1:05}.safetensors" for name, shard in shards.items()}


class _File:
    """One safetensors file, preallocated in full."""

    def __init__(self, path: Path, meta: dict[str, Tensor]) -> None:
        self.meta, self.missing = meta, {name: tensor.numel() for name, tensor in meta.items()}
        self.pending = (0, 0)  # range of bytes without started writeback
        header: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
        begins, end = {}, 0
        # The widest types come first, so that every tensor is aligned to its element size.
        for name, tensor in sorted(meta.items(), key=lambda item: -item[1].itemsize):
            begins[name], end = end, end + tensor.nbytes
            span = [begins[name], end]
            header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.begins = {name: 8 + len(text) + begin for name, begin in begins.items()}
        self.file = path.open("wb")
        preallocate(self.file, 8 + len(text) + end)
        self.file.write(struct.pack("<Q", len(text)) + text)

    def write(self, name: str, first: int, piece: Tensor) -> None:
        dtype = self.meta[name].dtype
        position = self.begins[name] + first * dtype.itemsize
        self.file.seek(position)
        for part in piece.contiguous().reshape(-1).split(ROUNDED_BYTES // dtype.itemsize):
            content = memoryview(part.to(dtype).view(torch.uint8).numpy())
            for begin in range(0, len(content), WRITE_BYTES):
                self.file.write(content[begin : begin + WRITE_BYTES])
            low, high = self.pending
            end = position + len(content)
            low, high = (min(low, position), max(high, end)) if high else (position, end)
            if high - low >= WRITEBACK_BYTES:
                start_writeback(self.file, low, high - low)
                low = high = 0
            self.pending, position = (low, high), end
        self.missing[name] -= piece.numel()

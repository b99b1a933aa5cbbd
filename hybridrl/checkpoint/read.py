"""Opening a saved model for reading tensor by tensor, in any form that it may have been saved in."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from hybridrl.checkpoint.pickles import load
from hybridrl.checkpoint.tensors import TYPES, Part, Tensors, Unreadable, blank, reading
from hybridrl.checkpoint.verl import holds_verl, read_verl_model
from hybridrl.config import ConfigError
from hybridrl.config.model_directory import HUGGINGFACE, SHARDS

MODEL = "model."  # how names of the model's tensors begin in our own shards


def open_tensors(directory: Path) -> Tensors:
    """A saved step's model (.../global_step_N/actor), one of verl, or a Hugging Face directory.

    Raises ConfigError where there is none, or its files are damaged.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory")
    if (directory / SHARDS).is_file():
        tensors = read_shards(directory)
        if tensors.meta:
            return tensors
    if holds_verl(directory):
        return read_verl_model(directory)
    for place in (directory, directory / HUGGINGFACE):
        if any(place.glob("*.safetensors")):
            return read_safetensors(place)
    inside = [path.name for path in sorted(directory.iterdir()) if path.is_dir() and path.name in ("actor", "critic")]
    hint = f"; name the model in it, {directory / inside[0]}" if inside else ", such as .../global_step_N/actor"
    raise ConfigError(f"{directory} holds no saved model{hint}")


def read_shards(directory: Path, section: str = MODEL) -> Tensors:
    """What torch.distributed.checkpoint saved under a section, or with "" all tensors that it saved."""
    with reading(directory / SHARDS):
        metadata = FileSystemReader(directory).read_metadata()
        items = metadata.state_dict_metadata.items()
        tensors = {name: item for name, item in items if isinstance(item, TensorStorageMetadata)}
        saved = {name.removeprefix(section): item for name, item in tensors.items() if name.startswith(section)}
        meta = {name: blank(item.size, item.properties.dtype) for name, item in saved.items()}

    def parts(name: str) -> Iterator[Part]:
        for chunk in saved[name].chunks:
            place = metadata.storage_data[MetadataIndex(section + name, chunk.offsets)]
            path = directory / place.relative_path
            with reading(path):
                part = load(path, place.offset, place.length).mapped()
            yield chunk.offsets, part

    return Tensors("in shards", meta, parts)


def read_safetensors(directory: Path) -> Tensors:
    """The weights of a Hugging Face directory."""
    dtypes = {name: dtype for dtype, name in TYPES.items()}
    files, meta = {}, {}
    for file in _safetensors_files(directory):
        with reading(file), safe_open(file, "pt") as tensors:
            for name in tensors.offset_keys():
                part = tensors.get_slice(name)
                files[name], meta[name] = file, blank(torch.Size(part.get_shape()), dtypes[part.get_dtype()])

    def parts(name: str) -> Iterator[Part]:
        with reading(files[name]), safe_open(files[name], "pt") as tensors:
            yield [0] * meta[name].dim(), tensors.get_tensor(name)

    return Tensors("as safetensors", meta, parts)


def _safetensors_files(directory: Path) -> list[Path]:
    index = directory / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        return sorted(directory.glob("*.safetensors"))
    with reading(index):
        files = [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise Unreadable(f"{directory}: {', '.join(missing[:3])} is missing, which {index.name} names")
    return files

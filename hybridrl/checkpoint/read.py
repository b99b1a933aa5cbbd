"""Opening a saved model for reading tensor by tensor, in any form that it may have been saved in."""

import json
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hybridrl.checkpoint.pickles import load
from hybridrl.checkpoint.shards import ShardReader
from hybridrl.checkpoint.stored import Stored
from hybridrl.checkpoint.tensors import TYPES, Part, Tensors, Unreadable, blank, reading
from hybridrl.checkpoint.verl import VerlReader, holds_verl, read_verl_model
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


def state_reader(directory: Path, *, moments: bool = True) -> StorageReader:
    """What torch.distributed.checkpoint reads a saved model's state with, of ours or of verl's; without `moments` the
    optimizer need not be readable. Raises ConfigError where a file of verl's is missing or damaged."""
    return VerlReader(directory, moments=moments) if holds_verl(directory) else ShardReader(directory)


def saved_shapes(reader: StorageReader, directory: Path) -> dict[str, dict[str, torch.Size]]:
    """The parts of a state (model, optimizer, extra) that a directory has, each with its tensors' shapes by name.
    Raises Unreadable."""
    if isinstance(reader, ShardReader) and not (directory / SHARDS).is_file():
        return {}
    with reading(directory / SHARDS):
        saved = reader.read_metadata().state_dict_metadata
    found: dict[str, dict[str, torch.Size]] = {}
    for key, item in saved.items():
        part, _, name = key.partition(".")
        found.setdefault(part, {}).update({name: item.size} if isinstance(item, TensorStorageMetadata) else {})
    return found


def check_parts(directory: Path, parts: Collection[str]) -> None:
    """Refuse a saved model that lacks one of these parts of its state, or cannot be read, with the way out."""
    resettable = {"optimizer", "extra"}
    saved = saved_shapes(state_reader(directory, moments=not resettable.isdisjoint(parts)), directory)
    if lacking := [part for part in parts if part not in saved]:
        way_out = "trainer.reset_optimizer=true goes on without moments and schedule"
        further = f"; {way_out}" if resettable.issuperset(lacking) else ", see checkpoint.save_contents"
        raise ConfigError(f"{directory}: no {' and '.join(lacking)} was saved there{further}")


def read_shards(directory: Path, section: str = MODEL) -> Tensors:
    """What torch.distributed.checkpoint saved under a section, or with "" all tensors that it saved."""
    with reading(directory / SHARDS):
        metadata = ShardReader(directory).read_metadata()
        items = metadata.state_dict_metadata.items()
        tensors = {name: item for name, item in items if isinstance(item, TensorStorageMetadata)}
        saved = {name.removeprefix(section): item for name, item in tensors.items() if name.startswith(section)}
        meta = {name: blank(item.size, item.properties.dtype) for name, item in saved.items()}

    def parts(name: str) -> Iterator[Part]:
        for chunk in saved[name].chunks:
            place = metadata.storage_data[MetadataIndex(section + name, chunk.offsets)]
            path = directory / place.relative_path
            with reading(path):
                yield from load(path, place.offset, place.length).parts(chunk.offsets)

    return Tensors("in shards", meta, parts)


def read_safetensors(directory: Path, only: str | None = None) -> Tensors:
    """The weights of a Hugging Face directory, or those in one file there."""
    stored = stored_tensors(directory, only)
    meta = {name: blank(tensor.shape, tensor.dtype) for name, tensor in stored.items()}

    def parts(name: str) -> Iterator[Part]:
        with reading(stored[name].file):
            yield from stored[name].parts([0] * meta[name].dim())

    return Tensors("as safetensors", meta, parts)


def stored_tensors(directory: Path, only: str | None = None) -> dict[str, Stored]:
    """Where the weights of a Hugging Face directory lie, or those in one file there. Raises Unreadable where a file of
    theirs is missing, damaged, or longer or shorter than it should be."""
    files = [directory / only] if only else _safetensors_files(directory)
    return {name: stored for file in files for name, stored in _stored_in(file).items()}


def _stored_in(file: Path) -> dict[str, Stored]:
    dtypes = {name: dtype for dtype, name in TYPES.items()}
    with reading(file), safe_open(file, "pt") as checked, file.open("rb") as content:
        size = int.from_bytes(content.read(8), "little")
        header, found = json.loads(content.read(size)), {}
        for name in checked.offset_keys():
            entry, shape = header[name], torch.Size(header[name]["shape"])
            begin, end = entry["data_offsets"]
            stride = blank(shape, torch.uint8).stride()
            found[name] = Stored(file, 8 + size + begin, end - begin, dtypes[entry["dtype"]], shape, stride, 0)
        return found


def _safetensors_files(directory: Path) -> list[Path]:
    """The files with a model's weights; some directories have them in other files again, for other software."""
    index, single = directory / SAFE_WEIGHTS_INDEX_NAME, directory / SAFE_WEIGHTS_NAME
    if not index.is_file():
        return [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    with reading(index):
        files = [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise Unreadable(f"{directory}: {', '.join(missing[:3])} is missing, which {index.name} names")
    return files

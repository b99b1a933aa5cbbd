"""Open a saved model for reading tensor by tensor: hybridrl's shards, verl's files, safetensors, or a LoRA adapter.

torch's own reader of sharded checkpoints unpickles `.metadata`, and every value that is not a tensor, with
`pickle.load`: it calls any function that the file names. Here metadata is restricted to torch's metadata classes, and
values to plain types.
"""

import io
import json
import os
import pickle
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PosixPath
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, StorageReader, filesystem, metadata
from torch.distributed.checkpoint.planner import ReadItem
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hybridrl.checkpoint.tensors import TYPES, Chunk, StoredTensor, Tensors, Unreadable, blank, load, reading
from hybridrl.config import ConfigError
from hybridrl.config.files import (
    ADAPTER_CONFIG,
    HUGGINGFACE,
    SHARDS,
    adapter_settings,
    holds_verl,
    leads_outside,
    resolve_model,
)
from hybridrl.plugins import load as plugin

MODEL, UPDATES = "model.", "extra.updates"  # in a sharded checkpoint, prefix of the model's tensors, and a key
ADAPTER = "default"  # peft's name of a model's only adapter in parameter names; absent in files
PREFIX = "base_model.model."  # prefix of every name in peft's files
PAIR = ".lora_"  # part of the names of A and B only
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def open_tensors(directory: Path) -> Tensors:
    """Open the model of a checkpoint (.../global_step_N/actor), hybridrl's or verl's, or a Hugging Face directory.
    Raises ConfigError if there is none, Unreadable if its files are damaged."""
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory")
    if (directory / SHARDS).is_file():
        tensors = read_shards(directory)
        if tensors.meta:
            return tensors
    if holds_verl(directory):
        return plugin("verl.checkpoint").read_verl_model(directory)
    for path in (directory, directory / HUGGINGFACE):
        if any(path.glob("*.safetensors")):
            return read_safetensors(path)
    inside = [path.name for path in sorted(directory.iterdir()) if path.is_dir() and path.name in ("actor", "critic")]
    newest = max(
        directory.glob("global_step_*/actor"), key=lambda path: (len(path.parent.name), path.parent.name), default=None
    )
    if newest:
        raise ConfigError(f"{directory} holds checkpoints", fix=f"name a model of the newest, {newest}")
    fix = f"name the model in it, {directory / inside[0]}" if inside else "name one, such as .../global_step_N/actor"
    raise ConfigError(f"{directory} holds no saved model", fix=fix)


def state_reader(directory: Path, *, moments: bool = True) -> StorageReader:
    """Return the torch.distributed.checkpoint reader of a model's state. Without `moments` the optimizer need not be
    readable. Raises ConfigError if files of verl are missing or damaged."""
    if holds_verl(directory):
        return plugin("verl.checkpoint").VerlReader(directory, moments=moments)
    return ShardReader(directory)


def saved_shapes(reader: StorageReader, directory: Path) -> dict[str, dict[str, torch.Size]]:
    """Return the tensor shapes by name of each saved part of a state (model, optimizer, extra). Raises Unreadable."""
    if isinstance(reader, ShardReader) and not (directory / SHARDS).is_file():
        return {}
    with reading(directory / SHARDS):
        saved = reader.read_metadata().state_dict_metadata
    shapes: dict[str, dict[str, torch.Size]] = {}
    for key, item in saved.items():
        part, _, name = key.partition(".")
        shapes.setdefault(part, {})
        if isinstance(item, metadata.TensorStorageMetadata):
            shapes[part][name] = item.size
    return shapes


def check_parts(directory: Path, parts: Collection[str], *, optional: bool = False) -> list[str]:
    """Return the saved ones of these parts of a model's state. Raises ConfigError if the state cannot be read or lacks
    a part; with `optional` only if it lacks the weights."""
    resettable = {"optimizer", "extra"}
    saved = saved_shapes(state_reader(directory, moments=not resettable.isdisjoint(parts)), directory)
    missing = [part for part in parts if part not in saved]
    if missing and not (optional and resettable.issuperset(missing)):
        cause = f"{directory}: no {' and '.join(missing)} was saved there"
        if resettable.issuperset(missing):
            raise ConfigError(cause, fix="trainer.reset_optimizer=true resumes without moments and schedule")
        raise ConfigError(f"{cause}, see checkpoint.save_contents")
    return [part for part in parts if part in saved]


class ShardReader(FileSystemReader):
    """Reads a sharded checkpoint. Raises Unreadable if its metadata is damaged or names anything but metadata."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.directory = directory

    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        with reading(self.directory / SHARDS), (self.directory / SHARDS).open("rb") as file:
            content = _MetadataUnpickler(file).load()
            if not isinstance(content, metadata.Metadata):
                raise ValueError("it holds no metadata of a checkpoint")
            for stored in (content.storage_data or {}).values():
                if os.path.basename(stored.relative_path) != stored.relative_path:
                    raise ValueError(f"it names a file outside its directory, {stored.relative_path!r}")
        content.storage_meta = content.storage_meta or metadata.StorageMeta()
        content.storage_meta.load_id = self.load_id
        return content


class PlainPlanner(DefaultLoadPlanner):
    """Loads values that are not tensors, such as the number of updates, with torch's restricted unpickler."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()  # the base class unpickles this without restriction
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _SAFE:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not part of a checkpoint's metadata")
        return _SAFE[f"{module}.{name}"]


def _member(kind: type, name: str) -> Any:
    """Return a member of the only enumeration that is built. Python 3.11.2 pickles a member as `getattr(kind, name)`;
    3.11.7 and 3.12 call `kind` with its value."""
    if kind is not metadata._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"it asks for {name} of {kind}, which is not part of a checkpoint's metadata")
    return metadata._MEM_FORMAT_ENCODING[name]


_CLASSES = [
    metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata, metadata.Metadata, metadata.MetadataIndex,
    metadata.StorageMeta, metadata.TensorProperties, metadata.TensorStorageMetadata, metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
]  # fmt: skip
_SAFE = {
    **{f"{built.__module__}.{built.__name__}": built for built in _CLASSES},
    **{str(dtype): dtype for dtype in TYPES},
    "builtins.getattr": _member,
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": {"torch.strided": torch.strided}.__getitem__,
    "pathlib.PosixPath": PosixPath,
}


def read_shards(directory: Path, section: str = MODEL) -> Tensors:
    """Open the tensors of a section of a sharded checkpoint, or all of them for the section ""."""
    with reading(directory / SHARDS):
        index = ShardReader(directory).read_metadata()
        saved = {
            name.removeprefix(section): item
            for name, item in index.state_dict_metadata.items()
            if name.startswith(section) and isinstance(item, metadata.TensorStorageMetadata)
        }
        meta = {name: blank(item.size, item.properties.dtype) for name, item in saved.items()}

    def chunks(name: str) -> Iterator[Chunk]:
        for chunk in saved[name].chunks:
            stored = index.storage_data[metadata.MetadataIndex(section + name, chunk.offsets)]
            path = directory / stored.relative_path
            with reading(path):
                yield from load(path, stored.offset, stored.length).chunks(chunk.offsets)

    return Tensors("in shards", meta, chunks)


def read_safetensors(directory: Path, only: str | None = None) -> Tensors:
    """Open the weights of a Hugging Face directory, or of one file in it."""
    stored = stored_tensors(directory, only)
    meta = {name: blank(tensor.shape, tensor.dtype) for name, tensor in stored.items()}

    def chunks(name: str) -> Iterator[Chunk]:
        with reading(stored[name].file):
            yield from stored[name].chunks([0] * meta[name].dim())

    return Tensors("as safetensors", meta, chunks)


def stored_tensors(directory: Path, only: str | None = None) -> dict[str, StoredTensor]:
    """Locate the weights of a Hugging Face directory, or of one file in it. Raises Unreadable."""
    index, single = directory / SAFE_WEIGHTS_INDEX_NAME, directory / SAFE_WEIGHTS_NAME
    if only or (single.is_file() and not index.is_file()):
        files = [directory / only if only else single]
    elif not index.is_file():
        files = sorted(directory.glob("*.safetensors"))
    else:  # the index names the files to read: some directories hold further copies for other software
        with reading(index):
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if outside := [name for name in names if leads_outside(directory, name)]:
                raise ValueError(f"it names a file outside its directory, {outside[0]!r}")
            files = [directory / name for name in names]
        if missing := [file.name for file in files if not file.is_file()]:
            raise Unreadable(f"{directory}: {', '.join(missing[:3])} is missing, which {index.name} names")
    dtypes, tensors = {name: dtype for dtype, name in TYPES.items()}, {}
    for file in files:
        # safe_open verifies the header.
        with reading(file), safe_open(file, "pt") as checked, file.open("rb") as content:
            size = int.from_bytes(content.read(8), "little")
            header = json.loads(content.read(size))
            for name in checked.offset_keys():
                shape, (begin, end) = torch.Size(header[name]["shape"]), header[name]["data_offsets"]
                stride, dtype = blank(shape, torch.uint8).stride(), dtypes[header[name]["dtype"]]
                tensors[name] = StoredTensor(file, 8 + size + begin, end - begin, dtype, shape, stride, 0)
    return tensors


@dataclass(frozen=True)
class Adapter:
    """An adapter on disk: `tensors` by their names in peft's files, `settings` of adapter_config.json."""

    directory: Path
    settings: dict[str, Any]
    tensors: Tensors

    @property
    def scaling(self) -> float:
        return self.settings["lora_alpha"] / self.settings["r"]

    def pair(self, name: str) -> tuple[str, str] | None:
        """Return the names of A and B for a weight of the base, or None if it is not adapted."""
        stem = f"{PREFIX}{name.removesuffix('.weight')}.lora_"
        return (f"{stem}A.weight", f"{stem}B.weight") if f"{stem}A.weight" in self.tensors.meta else None


def file_name(parameter: str) -> str:
    """Return the name in peft's files of a parameter of an adapted model."""
    return PREFIX + parameter.replace(f".{ADAPTER}.", ".")


def open_adapter(directory: Path) -> Adapter:
    """Open an adapter. Raises ConfigError if its files are missing or damaged."""
    settings = adapter_settings(str(directory))
    if (directory / SHARDS).is_file():
        saved = open_tensors(directory)
        names = {file_name(name): name for name in saved.meta}
        meta = {name: saved.meta[own] for name, own in names.items()}
        return Adapter(directory, settings, replace(saved, meta=meta, chunks=lambda name: saved.chunks(names[name])))
    path = resolve_model(str(directory))
    if not (path / ADAPTER_WEIGHTS).is_file():
        raise ConfigError(f"{path} has {ADAPTER_CONFIG} and no {ADAPTER_WEIGHTS}", fix="copy or save the adapter again")
    return Adapter(directory, settings, read_safetensors(path, ADAPTER_WEIGHTS))


def merge_into(base: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return base [out, in] + scaling * B [out, rank] @ A [rank, in], computed in float32."""
    return torch.addmm(base.float(), b.float(), a.float(), alpha=scaling)


def merged(base: Tensors, adapter: Adapter) -> Tensors:
    """Return the merged model, computed as each tensor is read: adapted weights in float32, others in their type."""
    trained = {name.removeprefix(PREFIX): tensor for name, tensor in adapter.tensors.meta.items() if PAIR not in name}
    adapted = {name: tensor.float() for name, tensor in base.meta.items() if adapter.pair(name)}

    def chunks(name: str) -> Iterable[Chunk]:
        if name in trained:
            return adapter.tensors.chunks(PREFIX + name)
        if name not in adapted:
            return base.chunks(name)
        a, b = map(adapter.tensors.read, adapter.pair(name))
        return [([0] * base.meta[name].dim(), merge_into(base.read(name), a, b, adapter.scaling))]

    meta = base.meta | adapted | trained
    if adapter.settings.get("task_type") == "TOKEN_CLS":  # a value model has a value head, not the base's head
        within = {name.removeprefix(PREFIX).split(".")[0] for name in adapter.tensors.meta}
        meta = {name: tensor for name, tensor in meta.items() if name.split(".")[0] in within}
    return Tensors(f"{base.form}, with an adapter", meta, chunks, faults=adapter.tensors.faults)

"""Read a LoRA adapter from peft's directory, or from a checkpoint that was trained through one."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridrl.checkpoint.read import open_tensors, read_safetensors
from hybridrl.checkpoint.tensors import Chunk, Tensors
from hybridrl.config import ConfigError
from hybridrl.config.files import ADAPTER_CONFIG, SHARDS, adapter_settings, resolve_model

ADAPTER = "default"  # peft's name of a model's only adapter in parameter names; absent in files
PREFIX = "base_model.model."  # prefix of every name in peft's files
PAIR = ".lora_"  # part of the names of A and B only
ADAPTER_WEIGHTS = "adapter_model.safetensors"


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
        pair = map(adapter.tensors.read, adapter.pair(name))
        return [([0] * base.meta[name].dim(), merge_into(base.read(name), *pair, adapter.scaling))]

    meta = base.meta | adapted | trained
    return Tensors(f"{base.form}, with an adapter", meta, chunks, faults=adapter.tensors.faults)

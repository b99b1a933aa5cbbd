"""A LoRA adapter on disk: peft's directory, or a saved step of training through one. Knows names and tensors alone."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridrl.checkpoint.read import open_tensors, read_safetensors
from hybridrl.checkpoint.tensors import Part, Tensors
from hybridrl.config import ConfigError
from hybridrl.config.model_directory import ADAPTER_CONFIG, SHARDS, adapter_settings, resolve_model

ADAPTER = "default"  # as peft calls the one adapter of a model in its parameters' names, but not in files
PREFIX = "base_model.model."  # before every name in peft's files
PAIR = ".lora_"  # in the names of a pair's tensors, and of no others
ADAPTER_WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True)
class Adapter:
    """`tensors` are named as in peft's files; `settings` are those of adapter_config.json."""

    directory: Path
    settings: dict[str, Any]
    tensors: Tensors

    @property
    def base(self) -> str:
        """The model that it was trained on."""
        return self.settings["base_model_name_or_path"]

    @property
    def scaling(self) -> float:
        return self.settings["lora_alpha"] / self.settings["r"]

    def pair(self, name: str) -> tuple[str, str] | None:
        """The names of A and B beside a weight of the base, if it has them."""
        stem = f"{PREFIX}{name.removesuffix('.weight')}.lora_"
        return (f"{stem}A.weight", f"{stem}B.weight") if f"{stem}A.weight" in self.tensors.meta else None


def file_name(parameter: str) -> str:
    """What peft's files call a parameter of an adapted model."""
    return PREFIX + parameter.replace(f".{ADAPTER}.", ".")


def open_adapter(directory: Path) -> Adapter:
    """Raises ConfigError where its files are missing or damaged."""
    settings = adapter_settings(str(directory))
    if (directory / SHARDS).is_file():
        saved = open_tensors(directory)
        names = {file_name(name): name for name in saved.meta}
        tensors = replace(
            saved,
            meta={name: saved.meta[own] for name, own in names.items()},
            parts=lambda name: saved.parts(names[name]),
        )
    else:
        place = resolve_model(str(directory))
        if not (place / ADAPTER_WEIGHTS).is_file():
            raise ConfigError(f"{place} has {ADAPTER_CONFIG} and no {ADAPTER_WEIGHTS}; copy or save the adapter anew")
        tensors = read_safetensors(place, ADAPTER_WEIGHTS)
    return Adapter(directory, settings, tensors)


def merge_into(base: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """The weight of a linear layer [out, in] with its pair, A [rank, in] and B [out, rank], added to it; in float32."""
    return torch.addmm(base.float(), b.float(), a.float(), alpha=scaling)


def merged(base: Tensors, adapter: Adapter) -> Tensors:
    """The model that base and adapter are together, computed when a tensor is read: weights with a pair in float32, all
    others in their own types."""
    trained = {name.removeprefix(PREFIX): tensor for name, tensor in adapter.tensors.meta.items() if PAIR not in name}
    added = {name: tensor.float() for name, tensor in base.meta.items() if adapter.pair(name)}

    def parts(name: str) -> Iterable[Part]:
        if name in trained:
            return adapter.tensors.parts(PREFIX + name)
        if name not in added:
            return base.parts(name)
        pair = map(adapter.tensors.read, adapter.pair(name))
        return [([0] * base.meta[name].dim(), merge_into(base.read(name), *pair, adapter.scaling))]

    meta = base.meta | added | trained
    return Tensors(f"{base.form}, with an adapter", meta, parts, faults=adapter.tensors.faults)

"""What is merged: a saved model's tensors, and the model of its configuration, which says what they have to be."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybridrl.checkpoint.read import open_tensors
from hybridrl.checkpoint.tensors import Tensors
from hybridrl.config import ConfigError
from hybridrl.config.model_directory import resolve_model
from hybridrl.model_merger.blank_model import CONFIG, blank_model


class CheckFailed(Exception):
    """What was read or written is not what it has to be; the message names it."""


@dataclass(frozen=True)
class Source:
    """A saved model and, without weights (meta device), the `model` it has to be. `names`: its tensors in the model's
    order. `tied`: names of theirs that are but another name for one of them."""

    directory: Path
    huggingface: Path
    tensors: Tensors
    model: PreTrainedModel
    names: tuple[str, ...]
    tied: dict[str, str]

    @property
    def gives_values(self) -> bool:
        """Whether it says what a state is worth, and not which token comes next."""
        return not self.model.can_generate()

    def meta(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Shapes and types as they will be written: floating-point tensors in this type, or as they are saved."""
        saved = self.tensors.meta
        return {name: saved[name].to(_type(saved[name], dtype)) for name in self.names}

    def read(self, name: str, dtype: torch.dtype | None) -> Tensor:
        tensor = self.tensors.read(name)
        return tensor.to(_type(tensor, dtype))

    def pieces(self, name: str, dtype: torch.dtype | None) -> Iterator[tuple[int, Tensor]]:
        for first, piece in self.tensors.pieces(name):
            kind = _type(piece, dtype)
            yield first, piece if kind == piece.dtype else piece.clone().to(kind)

    def main_type(self, dtype: torch.dtype | None) -> torch.dtype:
        """The type of most of what will be written."""
        elements: Counter[torch.dtype] = Counter()
        for tensor in self.meta(dtype).values():
            elements[tensor.dtype] += tensor.numel()
        return elements.most_common(1)[0][0]

    def settings(self, dtype: torch.dtype | None) -> dict[str, Any]:
        """The configuration to write: as it was, but for the type and, of a value model, the class."""
        settings = json.loads((self.huggingface / CONFIG).read_text(encoding="utf-8"))
        settings["torch_dtype" if "torch_dtype" in settings else "dtype"] = _name(self.main_type(dtype))
        settings["architectures"] = [type(self.model).__name__]
        if self.gives_values:
            settings |= {"id2label": self.model.config.id2label, "label2id": self.model.config.label2id}
        return settings


def _type(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def type_names(meta: dict[str, Tensor]) -> str:
    return " and ".join(sorted({_name(tensor.dtype) for tensor in meta.values()}))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def open_source(directory: Path, *, value_model: bool = False, trusted: bool = False) -> Source:
    """Open a saved model and hold its tensors against its configuration. `trusted`: code that the model brings may run.

    Raises ConfigError, or CheckFailed where tensors are missing, not the model's or of other shapes.
    """
    tensors = open_tensors(directory)
    if adapters := [name for name in tensors.meta if "lora_" in name]:
        raise ConfigError(
            f"{directory} holds a LoRA adapter ({adapters[0]}), which is not merged yet; peft can merge it"
        )
    huggingface = resolve_model(str(directory))
    model = blank_model(huggingface, tensors.meta, value_model=value_model, trusted=trusted)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = model.state_dict(keep_vars=True)
    tied = {name: names[id(value)] for name, value in state.items() if names.get(id(value), name) != name}
    expected = {name: value for name, value in state.items() if name not in tied}
    source = Source(directory, huggingface, tensors, model, tuple(expected), tied)
    _refuse_other(source, expected)
    return source


def _refuse_other(source: Source, expected: dict[str, Tensor]) -> None:
    """Refuse tensors that are not those of the model."""
    saved = source.tensors.meta
    shapes = {name: f"{list(saved[name].shape)} for {list(expected[name].shape)}" for name in expected if name in saved}
    wrong = {
        "missing": [name for name in expected if name not in saved],
        "not the model's": [name for name in saved if name not in expected and name not in source.tied],
        "of another shape": [f"{n}: {s}" for n, s in shapes.items() if saved[n].shape != expected[n].shape],
    }
    for words, names in wrong.items():
        if names:
            raise CheckFailed(
                f"{source.directory}: of the tensors of {type(source.model).__name__}, {len(names)} are {words} "
                f"({', '.join(names[:3])}); it is not whole, or {source.huggingface / CONFIG} is of another model"
            )

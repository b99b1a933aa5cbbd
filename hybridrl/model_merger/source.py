"""What is merged: a saved model's tensors, and the model of its configuration, which says what they have to be."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybridrl.checkpoint.published import as_published, parts
from hybridrl.checkpoint.read import open_tensors
from hybridrl.checkpoint.tensors import Tensors
from hybridrl.checkpoint.verl import holds_verl
from hybridrl.config import ConfigError
from hybridrl.config.model_directory import resolve_model
from hybridrl.model_merger.blank_model import CONFIG, blank_model


class CheckFailed(Exception):
    """What was read or written is not what it has to be; the message names it."""


@dataclass(frozen=True)
class Source:
    """A saved model and, without weights (meta device), the `model` it has to be. `names`: its tensors in the model's
    order, and `parameters` those that training changes. `tied`: names of theirs that are but another name for one of
    them. `dtype`: that of the parameters where they are merged."""

    directory: Path
    huggingface: Path
    tensors: Tensors
    model: PreTrainedModel
    names: tuple[str, ...]
    parameters: frozenset[str]
    tied: dict[str, str]
    dtype: torch.dtype

    @property
    def gives_values(self) -> bool:
        """Whether it says what a state is worth, and not which token comes next."""
        return not self.model.can_generate()

    @property
    def saved(self) -> dict[str, Tensor]:
        """Shapes and types as they are saved."""
        return {name: self.tensors.meta[name] for name in self.names}

    @property
    def meta(self) -> dict[str, Tensor]:
        """Shapes and types as they will be written."""
        return {name: self.rounded(name, tensor) for name, tensor in self.saved.items()}

    def rounded(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter in the type to be written; buffers keep theirs, such as a router's corrections in float32."""
        return tensor.to(self.dtype) if name in self.parameters else tensor

    def read(self, name: str) -> Tensor:
        """A tensor whole, as it will be written."""
        return self.rounded(name, self.tensors.read(name))

    def settings(self) -> dict[str, Any]:
        """The configuration to write: as it was, but for the type and, of a value model, the class."""
        settings = json.loads((self.huggingface / CONFIG).read_text(encoding="utf-8"))
        settings["torch_dtype" if "torch_dtype" in settings else "dtype"] = type_name(self.dtype)
        settings["architectures"] = [type(self.model).__name__]
        if self.gives_values:
            settings |= {"id2label": self.model.config.id2label, "label2id": self.model.config.label2id}
        return settings


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def type_names(meta: dict[str, Tensor]) -> str:
    return " and ".join(sorted({type_name(tensor.dtype) for tensor in meta.values()}))


def open_source(
    directory: Path,
    dtype: torch.dtype | None = None,
    *,
    value_model: bool = False,
    trusted: bool = False,
    tensors: Tensors | None = None,
    huggingface: Path | None = None,
) -> Source:
    """Open a saved model and hold its tensors against its configuration. `dtype` to merge it in; by default the one
    that it computed in. `trusted`: code that the model brings may run. `tensors` and `huggingface` are given where the
    directory holds an adapter, of which others are the base.

    Raises ConfigError, or CheckFailed where tensors are missing, not the model's or of other shapes.
    """
    tensors = tensors or open_tensors(directory)
    if adapters := [name for name in tensors.meta if "lora_" in name]:
        raise ConfigError(
            f"{directory} holds a LoRA adapter ({adapters[0]}), which is not merged yet; peft can merge it"
        )
    huggingface = huggingface or resolve_model(str(directory))
    model = blank_model(huggingface, tensors.meta, value_model=value_model, trusted=trusted)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = model.state_dict(keep_vars=True)
    tied = {name: names[id(value)] for name, value in state.items() if names.get(id(value), name) != name}
    all_parts, parameters = parts(model), dict(model.named_parameters())
    expected = {name: value for part in all_parts for name, value in part.published.items()}
    tensors = as_published(tensors, model)
    if wrong := _differences(tensors.meta, expected, tied):
        raise CheckFailed(
            f"{directory}: of the tensors of {type(model).__name__}, {wrong}; it is not whole, or "
            f"{huggingface / CONFIG} is of another model"
        )
    trained = frozenset(name for part in all_parts if part.names[0] in parameters for name in part.published)
    dtype = dtype or _own_type(directory, model, [tensors.meta[name].dtype for name in trained])
    return Source(directory, huggingface, tensors, model, tuple(expected), trained, tied, dtype)


def _own_type(directory: Path, model: PreTrainedModel, saved: Iterable[torch.dtype]) -> torch.dtype:
    """The type that a model computed in: ours have it in their configuration; of verl's, which does not say, bfloat16,
    in which its own merger writes all. A wider one than was saved would add nothing."""
    widest = max(saved, key=lambda kind: kind.itemsize)
    computed_in = torch.bfloat16 if holds_verl(directory) else model.config.dtype
    return widest if computed_in is None or computed_in.itemsize > widest.itemsize else computed_in


def _differences(saved: dict[str, Tensor], expected: dict[str, Tensor], tied: dict[str, str]) -> str:
    """In which of three ways the tensors are not those of the model, in words; empty where they are."""
    common = [name for name in expected if name in saved]
    shapes = {name: f"{name}: {list(saved[name].shape)} for {list(expected[name].shape)}" for name in common}
    wrong = {
        "missing": [name for name in expected if name not in saved],
        "not the model's": [name for name in saved if name not in expected and name not in tied],
        "of another shape": [shapes[name] for name in common if saved[name].shape != expected[name].shape],
    }
    found = (f"{len(names)} are {words} ({', '.join(names[:3])})" for words, names in wrong.items() if names)
    return next(found, "")

"""Merge sources: the tensors of a saved model, and the model its configuration describes, which they must match."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import Tensor

from hybridrl.checkpoint.export import as_published, parts
from hybridrl.checkpoint.fingerprints import model_fingerprint
from hybridrl.checkpoint.read import Adapter, merged, open_adapter, open_tensors
from hybridrl.checkpoint.store import STATE
from hybridrl.checkpoint.tensors import Tensors
from hybridrl.config import ConfigError
from hybridrl.config.files import holds_adapter, holds_verl, resolve_model

CONFIG = "config.json"
VALUE_HEADS = ("score.weight", "classifier.weight")
# Ending of an architecture's name -> its auto class; all others (GPT2LMHeadModel) are language models.
AUTO = {
    "ForConditionalGeneration": transformers.AutoModelForImageTextToText,
    "ForTokenClassification": transformers.AutoModelForTokenClassification,
}


class CheckFailed(Exception):
    """Files read or written are not what they must be; the message names them."""


@dataclass(frozen=True)
class MergeSource:
    """A saved model and the `model` it must match, on the meta device. `names`: the tensors in the model's order;
    `parameters`: those that training changes; `tied`: aliases -> names; `dtype`: the type to write. A model that was
    trained through an `adapter` is merged with its `base` as it is read."""

    directory: Path
    huggingface: Path
    tensors: Tensors
    model: transformers.PreTrainedModel
    names: tuple[str, ...]
    parameters: frozenset[str]
    tied: dict[str, str]
    dtype: torch.dtype
    adapter: Adapter | None = None
    base: Tensors | None = None

    @property
    def is_value_model(self) -> bool:
        return not self.model.can_generate()

    @property
    def saved(self) -> dict[str, Tensor]:
        """Shapes and types as saved."""
        return {name: self.tensors.meta[name] for name in self.names}

    @property
    def meta(self) -> dict[str, Tensor]:
        """Shapes and types as they will be written."""
        return {name: self.rounded(name, tensor) for name, tensor in self.saved.items()}

    def rounded(self, name: str, tensor: Tensor) -> Tensor:
        """Return a parameter in the type to write; buffers keep theirs, such as a router's corrections in float32."""
        return tensor.to(self.dtype) if name in self.parameters else tensor

    def settings(self) -> dict[str, Any]:
        """Return the configuration to write: the saved one with this type and, for a value model, its class."""
        settings = json.loads((self.huggingface / CONFIG).read_text(encoding="utf-8"))
        settings["torch_dtype" if "torch_dtype" in settings else "dtype"] = type_name(self.dtype)
        settings["architectures"] = [type(self.model).__name__]
        if self.is_value_model:
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
    base: str | None = None,
    value_model: bool = False,
    trusted: bool = False,
) -> MergeSource:
    """Open a saved model and compare its tensors with its configuration. `dtype`: the type to merge it in, by default
    the one it computed in. `base`: where an adapter's base is, if it has moved. `trusted`: custom code of the model may
    run. Raises ConfigError, or CheckFailed if tensors are missing, unknown, or of another shape."""
    described, adapter, unadapted = directory, None, None
    if holds_adapter(str(directory)):
        adapter = open_adapter(directory)
        described = _base_of(adapter, base)
        unadapted = open_tensors(described)
        tensors = merged(unadapted, adapter)
    else:
        tensors = open_tensors(directory)
        if adapters := [name for name in tensors.meta if "lora_" in name]:
            cause = f"{directory} holds a LoRA adapter ({adapters[0]}), which cannot be merged yet"
            raise ConfigError(cause, fix="merge it with peft")
    huggingface = resolve_model(str(described))
    model = _blank_model(huggingface, tensors.meta, value_model=value_model, trusted=trusted)
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    state = model.state_dict(keep_vars=True)
    tied = {name: first[id(value)] for name, value in state.items() if first.get(id(value), name) != name}
    all_parts, parameters = parts(model), dict(model.named_parameters())
    expected = {name: value for part in all_parts for name, value in part.published.items()}
    tensors = as_published(tensors, model)
    if mismatch := _mismatch(tensors.meta, expected, tied):
        raise CheckFailed(
            f"{directory}: of the tensors of {type(model).__name__}, {mismatch}; it is incomplete, or "
            f"{huggingface / CONFIG} describes another model"
        )
    trained = frozenset(name for part in all_parts if part.names[0] in parameters for name in part.published)
    if dtype is None:
        # The type it computed in, but none wider than saved, which would add nothing. hybridrl records it in the
        # configuration; verl does not, and its own merger writes bfloat16.
        widest = max((tensors.meta[name].dtype for name in trained), key=lambda kind: kind.itemsize)
        dtype = torch.bfloat16 if holds_verl(directory) else model.config.dtype
        dtype = widest if dtype is None or dtype.itemsize > widest.itemsize else dtype
    names = tuple(expected)
    return MergeSource(directory, huggingface, tensors, model, names, trained, tied, dtype, adapter, unadapted)


def _blank_model(
    directory: Path, saved: dict[str, Tensor], *, value_model: bool, trusted: bool
) -> transformers.PreTrainedModel:
    """Build the model of a configuration on the meta device: a value model if stated, or if a value head was saved, as
    verl keeps the language model's architecture in a critic's configuration."""
    file = directory / CONFIG
    if not file.is_file():
        cause = f"{file} is missing, which describes the model"
        raise ConfigError(cause, fix="copy it from the model that training started with")
    try:
        settings = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=trusted)
    except (OSError, ValueError, KeyError) as error:
        fix = "" if trusted else "--trust-remote-code runs custom code of the model"
        raise ConfigError(f"{file}: {str(error).splitlines()[0][:200]}", fix=fix) from error
    heads = [name for name in VALUE_HEADS if name in saved]
    architecture = (settings.architectures or [""])[0]
    if value_model or heads:
        architecture = "ForTokenClassification"
    if heads:
        settings.num_labels = saved[heads[0]].shape[0]
    endings = (ending for ending in AUTO if architecture.endswith(ending))
    kind = AUTO.get(next(endings, ""), transformers.AutoModelForCausalLM)
    with torch.device("meta"):
        try:
            return kind.from_config(settings, trust_remote_code=trusted)
        except ValueError as error:
            raise ConfigError(f"{file}: {str(error).splitlines()[0][:200]}") from error


def _mismatch(saved: dict[str, Tensor], expected: dict[str, Tensor], tied: dict[str, str]) -> str:
    """Describe the first of three ways in which tensors differ from the model's; empty if they match."""
    common = [name for name in expected if name in saved and saved[name].shape != expected[name].shape]
    mismatches = {
        "missing": [name for name in expected if name not in saved],
        "not the model's": [name for name in saved if name not in expected and name not in tied],
        "of another shape": [f"{n}: {list(saved[n].shape)} for {list(expected[n].shape)}" for n in common],
    }
    lines = (f"{len(names)} are {kind} ({', '.join(names[:3])})" for kind, names in mismatches.items() if names)
    return next(lines, "")


def _base_of(adapter: Adapter, moved: str | None) -> Path:
    """Return the directory of the model that an adapter was trained on. Raises ConfigError if it is missing, or has
    other weights than the adapter was trained on."""
    directory, name = adapter.directory, moved or adapter.settings["base_model_name_or_path"]
    path = Path(name)
    if not path.is_dir():
        try:
            path = Path(snapshot_download(name))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            cause = f"{directory} is an adapter of {name}, which is not there"
            raise ConfigError(cause, fix="name the directory of that model: --base DIR") from error
    state = directory.absolute().parent / STATE
    bases = json.loads(state.read_text(encoding="utf-8")).get("bases", {}) if state.is_file() else {}
    known = [base for key, base in bases.items() if key.startswith("critic") == (directory.name == "critic")]
    if known and model_fingerprint(str(path) if Path(name).is_dir() else name) not in known:
        cause = f"{name} has other weights than the model that {directory} was trained on"
        raise ConfigError(cause, fix="name that model: --base")
    return path

"""Loading a Hugging Face model: it is made without memory for its weights, sharded, and then filled from the files.

Every rank reads the rows that it keeps and no others, so that no process ever holds the whole model. Names and shapes
of a checkpoint become the model's (a layer's experts lie in one tensor there) by transformers' own conversions.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig, load_state_dict
from transformers.utils import GENERATION_CONFIG_NAME

from hybridrl.checkpoint.read import open_tensors, stored_tensors
from hybridrl.checkpoint.stored import Stored
from hybridrl.checkpoint.tensors import reading
from hybridrl.config.custom_code import import_libraries
from hybridrl.config.families import disturbances, why_unsupported
from hybridrl.config.model_directory import is_sharded, resolve_model
from hybridrl.config.schema import ModelConfig
from hybridrl.training import attention
from hybridrl.training.recompute import recompute_layers

FROM_HUB = ["model*.safetensors", "*.json", "*.py"]
PICKLED = ["pytorch_model*.bin", "*.json", "*.py"]


class Weight:
    """A tensor of a file as transformers takes it: only what is asked for is read, into memory of one's own, since
    what is mapped from a file may be written over there."""

    def __init__(self, shape: Iterable[int], read: Callable[[Any], Tensor]) -> None:
        self.shape, self.read = list(shape), read

    def get_shape(self) -> list[int]:
        return self.shape

    def __getitem__(self, region: Any) -> Tensor:
        return self.read(region).clone()


def load_settings(config: ModelConfig, **changes: object) -> PreTrainedConfig:
    """The model's own configuration, without dropout that was not asked for: it would make noise of the ratio between
    the present and the old policy. ValueError where the trainer would compute such a model wrongly."""
    import_libraries(config.external_lib)
    overrides = {"trust_remote_code": config.trust_remote_code, **config.override_config, **changes}
    path = str(resolve_model(config.path))
    settings, further = AutoConfig.from_pretrained(path, return_unused_kwargs=True, **overrides)
    settings.update(further)  # what only an engine reads is saved with the model too
    for part in {id(part): part for part in (settings, settings.get_text_config())}.values():
        part.update(dict.fromkeys(disturbances(vars(part)).keys() - config.override_config.keys(), 0.0))
    reason = why_unsupported(settings.to_dict())
    if reason:
        raise ValueError(f"{config.path}: {reason}")
    return settings


def blank_model(
    make: Callable[..., PreTrainedModel], settings: PreTrainedConfig, config: ModelConfig, dtype: torch.dtype
) -> PreTrainedModel:
    """A model whose parameters have names, shapes and this type, and no memory (meta device). Its buffers are all
    there: those that no checkpoint holds, such as rotary frequencies, are computed where the model is made."""
    with init_empty_weights(include_buffers=False):
        model = make(settings, dtype=dtype, attn_implementation=attention.NAME).eval()
    model.tie_weights()  # anew: each parameter was replaced where it was registered
    for module in model.modules():
        for name in module._buffers.keys() - module._non_persistent_buffers_set:
            # Such as a router's corrections, which steer a choice: half precision would choose otherwise.
            buffer = module._buffers[name]
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.float()
    directory = resolve_model(config.path)
    if model.can_generate() and (directory / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    if config.enable_gradient_checkpointing:
        try:
            recompute_layers(model, selective=config.selective_checkpointing)
        except ValueError as error:
            raise ValueError(f"{config.path}: {error}; set model.enable_gradient_checkpointing=false") from error
    return model


@torch.no_grad()
def fill(
    model: PreTrainedModel, path: str, device: torch.device, fresh: Mapping[str, Tensor] | None = None
) -> PreTrainedModel:
    """Read a model's weights to this device, of a sharded one what this rank keeps. `fresh` tensors stand for what the
    directory or hub name lacks.

    Raises ValueError where a tensor is missing, which would be random numbers, or of another shape.
    """
    weights = dict(fresh or {}) | open_weights(path)
    plan = LoadStateDictConfig(device_map={"": device}, weight_mapping=get_model_conversion_mapping(model))
    found, _ = convert_and_load_state_dict_in_model(model, weights, plan)
    model.tie_weights(missing_keys=found.missing_keys, recompute_mapping=False)
    # What is written is a checkpoint as the family has it, whatever form was read.
    model._weight_conversions = None
    if wrong := sorted(f"{name}: {list(ours)} for {list(theirs)}" for name, ours, theirs in found.mismatched_keys):
        raise ValueError(f"{path}: {len(wrong)} of the model's weights have another shape ({', '.join(wrong[:3])})")
    if failed := sorted(found.conversion_errors):
        raise ValueError(f"{path}: {failed[0]} cannot be read: {found.conversion_errors[failed[0]]}")
    if names := sorted(found.missing_keys):
        raise ValueError(f"{path}: {len(names)} of the model's weights are not there ({', '.join(names[:3])})")
    return model


def open_weights(path: str) -> dict[str, Weight]:
    """The tensors of a directory, a saved step or a hub name."""
    if is_sharded(path):
        saved = open_tensors(Path(path))
        return {name: Weight(saved.meta[name].shape, partial(_read, saved.read, name)) for name in saved.meta}
    directory = resolve_model(path)
    if not directory.is_dir():
        directory = _from_hub(path)
    stored = stored_tensors(directory)
    found = {name: Weight(tensor.shape, partial(_mapped, tensor)) for name, tensor in stored.items()}
    if not found:
        for file in sorted(directory.glob("*.bin")):
            with reading(file):
                tensors = load_state_dict(str(file))
            found |= {name: Weight(tensor.shape, tensor.__getitem__) for name, tensor in tensors.items()}
    return found


def _mapped(stored: Stored, region: Any) -> Tensor:
    return stored.mapped()[region]


def _read(read: Callable[[str], Tensor], name: str, region: Any) -> Tensor:
    return read(name)[region]


def _from_hub(name: str) -> Path:
    directory = Path(snapshot_download(name, allow_patterns=FROM_HUB))
    return directory if any(directory.glob("*.safetensors")) else Path(snapshot_download(name, allow_patterns=PICKLED))


def layer_classes(model: PreTrainedModel, named: str | list[str] | None) -> set[str]:
    """Class names of the layers to shard one by one: those named, or those the model says must not be split, or the
    kind that its longest list of modules has."""
    present = {type(module).__name__ for module in model.modules()}
    if named:
        wanted = {named} if isinstance(named, str) else set(named)
        if unknown := sorted(wanted - present):
            raise ValueError(
                f"fsdp_config.wrap_policy.transformer_layer_cls_to_wrap={', '.join(unknown)}: the model has no such "
                f"layer; it has {', '.join(sorted(_repeated(model)))}, and null finds the right one"
            )
        return wanted
    return set(model._no_split_modules or []) & present or _repeated(model)


def _repeated(model: PreTrainedModel) -> set[str]:
    """The classes of what the model has most of, one after another."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return {type(layer).__name__ for layer in max(lists, key=len, default=())}

"""Loading a Hugging Face model: created without memory for its weights, sharded, and then filled from the files.

Every rank reads only the rows of its own shard: no process ever holds the full model. The names and shapes of a
checkpoint are converted to the model's (which stacks a layer's experts, for example) by transformers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from torch._functorch import config as functorch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig, load_state_dict
from transformers.utils import GENERATION_CONFIG_NAME

from hybridrl.checkpoint.export import conversions
from hybridrl.checkpoint.read import open_tensors, stored_tensors
from hybridrl.checkpoint.tensors import reading
from hybridrl.config.catalog import disturbances, why_unsupported
from hybridrl.config.custom_code import import_libraries
from hybridrl.config.files import is_sharded, resolve_model
from hybridrl.config.schema import ModelConfig
from hybridrl.core.training import attention
from hybridrl.core.training.vision import family_of

FROM_HUB = ["model*.safetensors", "*.json", "*.py"]
PICKLED = ["pytorch_model*.bin", "*.json", "*.py"]
KEPT = 0.5  # share of what a compiled layer would keep for its backward pass, under selective checkpointing


class Weight:
    """A tensor of a file with the interface that transformers expects. Only the requested region is read, and copied,
    since a mapped file may be overwritten."""

    def __init__(self, shape: Iterable[int], read: Callable[[Any], Tensor]) -> None:
        self.shape, self.read = list(shape), read

    def get_shape(self) -> list[int]:
        return self.shape

    def __getitem__(self, region: Any) -> Tensor:
        return self.read(region).clone()


def load_settings(config: ModelConfig, **changes: object) -> PreTrainedConfig:
    """Return the model's configuration, without dropout unless it is requested: dropout would add noise to the ratio
    between the current and the old policy. Raises ValueError if the trainer would compute this model wrongly."""
    import_libraries(config.external_lib)
    overrides = {"trust_remote_code": config.trust_remote_code, **config.override_config, **changes}
    path = str(resolve_model(config.path))
    settings, unused = AutoConfig.from_pretrained(path, return_unused_kwargs=True, **overrides)
    settings.update(unused)  # values that only an engine reads are saved with the model too
    for part in {id(part): part for part in (settings, settings.get_text_config())}.values():
        part.update(dict.fromkeys(disturbances(vars(part)).keys() - config.override_config.keys(), 0.0))
    reason = why_unsupported(settings.to_dict())
    if reason:
        raise ValueError(f"{config.path}: {reason}")
    return settings


def from_settings(settings: PreTrainedConfig, config: ModelConfig, **options: Any) -> PreTrainedModel:
    """Return a language model with random weights. One that sees is another class: transformers' class for text would
    drop its tower without an error."""
    kind = AutoModelForImageTextToText if family_of(settings) else AutoModelForCausalLM
    return kind.from_config(settings, trust_remote_code=config.trust_remote_code, **options)


def is_random(model: PreTrainedModel, config: ModelConfig) -> bool:
    """Return whether the settings or layers of a model drop activations in training, or change them at random. The
    dropout before the head of a value model is never computed."""
    parts = (model.config, model.config.get_text_config())
    drops = any(isinstance(module, nn.Dropout) and module.p for module in model.base_model.modules())
    return bool(drops or config.lora.dropout or any(disturbances(vars(part)) for part in parts))


def blank_model(
    make: Callable[..., PreTrainedModel], settings: PreTrainedConfig, config: ModelConfig, dtype: torch.dtype
) -> PreTrainedModel:
    """Return a model whose parameters are on the meta device. Its buffers are real: those that no checkpoint holds,
    such as rotary frequencies, are computed when the model is constructed."""
    with init_empty_weights(include_buffers=False):
        model = make(settings, dtype=dtype, attn_implementation=attention.implementation(settings)).eval()
    model.tie_weights()  # again, as `init_empty_weights` replaced each parameter at its registration
    for module in model.modules():
        for name in module._buffers.keys() - module._non_persistent_buffers_set:
            # For example a router's correction bias: in half precision other experts would be chosen.
            buffer = module._buffers[name]
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.float()
    directory = resolve_model(config.path)
    if model.can_generate() and (directory / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    if config.selective_checkpointing:  # read when layers are compiled; all others ignore it
        functorch.activation_memory_budget = KEPT
    if every := config.recomputes_every:
        # The state of random numbers is only kept, per layer, where activations may be dropped.
        custom = config.trust_remote_code or config.external_lib  # may drop some whatever the settings
        options = {"use_reentrant": False, "preserve_rng_state": bool(custom) or is_random(model, config)}
        try:
            model.gradient_checkpointing_enable(options, every_n_layers=every)
        except ValueError as error:
            raise ValueError(f"{config.path}: {error}; set model.enable_gradient_checkpointing=false") from error
    return model


@torch.no_grad()
def fill(
    model: PreTrainedModel, path: str, device: torch.device, fresh: Mapping[str, Tensor] | None = None
) -> PreTrainedModel:
    """Read a model's weights to this device; for a sharded model only this rank's part. `fresh` has the
    tensors that the directory or hub name may lack. Raises ValueError if a tensor has another shape, or is missing and
    would stay uninitialised."""
    weights = dict(fresh or {}) | open_weights(path)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    plan = LoadStateDictConfig(device_map={"": device}, weight_mapping=conversions(model))
    result, _ = convert_and_load_state_dict_in_model(model, weights, plan)
    model.tie_weights(missing_keys=result.missing_keys, recompute_mapping=False)
    for name in frozen:  # it makes new parameters of a model that is not sharded, all trained
        model.get_parameter(name).requires_grad_(False)
    # Checkpoints are written in the family's standard form, whichever form was read.
    model._weight_conversions = None
    if other := sorted(f"{name}: {list(ours)} for {list(theirs)}" for name, ours, theirs in result.mismatched_keys):
        raise ValueError(f"{path}: {len(other)} of the model's weights have another shape ({', '.join(other[:3])})")
    if failed := sorted(result.conversion_errors):
        raise ValueError(f"{path}: {failed[0]} cannot be read: {result.conversion_errors[failed[0]]}")
    if names := sorted(result.missing_keys):
        raise ValueError(f"{path}: {len(names)} of the model's weights are missing ({', '.join(names[:3])})")
    return model


def open_weights(path: str) -> dict[str, Weight]:
    """Return the tensors of a directory, a checkpoint or a hub name."""
    if is_sharded(path):
        saved = open_tensors(Path(path))
        return {
            name: Weight(saved.meta[name].shape, lambda region, name=name: saved.read(name)[region])
            for name in saved.meta
        }
    directory = resolve_model(path)
    if not directory.is_dir():
        directory = Path(snapshot_download(path, allow_patterns=FROM_HUB))
        if not any(directory.glob("*.safetensors")):
            directory = Path(snapshot_download(path, allow_patterns=PICKLED))
    stored = stored_tensors(directory)
    weights = {
        name: Weight(tensor.shape, lambda region, tensor=tensor: tensor.mapped()[region])
        for name, tensor in stored.items()
    }
    if not weights:
        for file in sorted(directory.glob("*.bin")):
            with reading(file):
                tensors = load_state_dict(str(file))
            weights |= {name: Weight(tensor.shape, tensor.__getitem__) for name, tensor in tensors.items()}
    return weights


def layer_classes(model: PreTrainedModel, named: Sequence[str] = ()) -> set[str]:
    """Return the class names of the layers to shard one by one: `named`, else the model's `_no_split_modules`, else
    the class in its longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    repeated = {type(layer).__name__ for layer in max(lists, key=len, default=())}
    present = {type(module).__name__ for module in model.modules()}
    if named:
        if unknown := sorted({*named} - present):
            raise ValueError(
                f"fsdp_config.wrap_policy.transformer_layer_cls_to_wrap={', '.join(unknown)}: the model has no such "
                f"layer; it has {', '.join(sorted(repeated))}, and null selects the right one"
            )
        return {*named}
    return set(model._no_split_modules or []) & present or repeated

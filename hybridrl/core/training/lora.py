"""LoRA (Hu et al. 2021): only a pair of small matrices for each linear layer is trained, the base model is frozen.

peft creates the pairs. This module decides which layers get one, initialises, merges, reads and writes them. The base
model may still be on the meta device.
"""

import re
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybridrl.checkpoint.read import ADAPTER, ADAPTER_WEIGHTS, merge_into, open_adapter
from hybridrl.config.catalog import ALL_LINEAR
from hybridrl.config.findings import ConfigError, nearest
from hybridrl.config.schema import ModelConfig
from hybridrl.core.training.fsdp import full_tensor, local, own_shard
from hybridrl.core.training.model import HOST, SCORED, adapter_parameters, pairs
from hybridrl.core.training.vision import family_of

PATTERN = re.compile(r"[^\w.-]")  # characters of a regular expression that layer names do not contain


def add_adapter(model: PreTrainedModel, config: ModelConfig, dtype: torch.dtype, seed: int, key: str) -> None:
    """Freeze a model that is not sharded yet and add a new adapter of this type to it, in host memory: B is zero, A
    follows from the seed. A value head is trained directly. Raises ConfigError if the model lacks the layers, or if
    the configured adapter belongs to another model."""
    heads = []
    if not model.can_generate():  # a value model
        heads = [name for name, child in model.named_children() if isinstance(child, nn.Linear)]
    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora.dropout,
        target_modules=_targets(model, config, heads, key),
        task_type=("SEQ_CLS" if type(model).__name__.endswith(SCORED) else "TOKEN_CLS") if heads else "CAUSAL_LM",
        base_model_name_or_path=config.path,
    )
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(settings, model, ADAPTER)
        torch.manual_seed(seed)
        for layer in pairs(model).values():  # peft creates a pair on its layer's device, which may be meta
            for half in (layer.lora_A, layer.lora_B):
                half[ADAPTER].to_empty(device=HOST).to(dtype)
            layer.reset_lora_parameters(ADAPTER, init_lora_weights=True)
    # The values that peft writes to adapter_config.json.
    settings.inference_mode, settings.modules_to_save = True, heads or None
    for name in heads:
        model.get_submodule(name).requires_grad_(True)
        model.get_submodule(name).to(dtype)
    if config.lora_adapter_path:
        _check_saved_adapter(model, config.lora_adapter_path, key)


def _targets(model: PreTrainedModel, config: ModelConfig, heads: list[str], key: str) -> list[str]:
    """Return the names of the linear layers to adapt; only the last parts of the names if these are unambiguous."""
    tops = [model.get_output_embeddings(), *map(model.get_submodule, heads)]
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    # The engines have no place for an adapter in the tower of a model that sees.
    decoder = {id(module) for module in (model.get_decoder() if family_of(model.config) else model).modules()}
    linear = [name for name, module in layers.items() if id(module) in decoder and module not in tops]
    targets = linear if config.target_modules == ALL_LINEAR else _named("target_modules", config, linear, key)
    excluded = _named("exclude_modules", config, linear, key)
    adapted = [name for name in targets if name not in excluded]
    if not adapted:
        raise ConfigError(
            f"{key}.target_modules: no layer of {config.path} is left to adapt", fix="exclude fewer layers"
        )
    ends = {_end(name) for name in adapted}
    return sorted(ends) if adapted == [name for name in layers if _end(name) in ends] else adapted


def _named(option: str, config: ModelConfig, linear: list[str], key: str) -> list[str]:
    """Return the layers that an option selects, by the end of a name or by a regular expression for the full name. A
    name that matches no layer is rejected. An expression may exclude nothing: one list then suits several models."""
    selected: dict[str, None] = {}
    for text in vars(config)[option]:
        try:
            pattern = re.compile(rf"(.*\.)?{re.escape(text)}|{text}")
        except re.error as error:
            raise ConfigError(f"{key}.{option}: {text} is not a valid regular expression ({error})") from error
        matching = [name for name in linear if pattern.fullmatch(name)]
        if not matching and not (option == "exclude_modules" and PATTERN.search(text)):
            ends = sorted({_end(name) for name in linear})
            near = nearest(_end(text), ends) if ends else []
            hint = f"nearest: {', '.join(near)}" if near else f"available: {', '.join(ends) or 'none'}"
            raise ConfigError(f"{key}.{option}: {text} is not a linear layer of {config.path}; {hint}")
        selected |= dict.fromkeys(matching)
    return list(selected)


def _end(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _check_saved_adapter(model: PreTrainedModel, path: str, key: str) -> None:
    """Reject an adapter on disk that does not belong to this model."""
    saved, present = open_adapter(Path(path)).tensors, adapter_parameters(model)
    errors = [f"it has no {name}" for name in present if name not in saved.meta]
    errors += [f"it has {name}, which the model does not have" for name in saved.meta if name not in present]
    errors += [
        f"{name} is {list(saved.meta[name].shape)} there and {list(present[name].shape)} here"
        for name in present
        if name in saved.meta and saved.meta[name].shape != present[name].shape
    ]
    if errors:
        omitted = f"; and {len(errors) - 3} more" if len(errors) > 3 else ""
        raise ConfigError(
            f"{key}.lora_adapter_path={path}: the adapter belongs to another model: {'; '.join(errors[:3])}{omitted}",
            fix=f"name its base model in {key}.path, or another adapter",
        )


@torch.no_grad()
def load_adapter(model: PreTrainedModel, directory: Path) -> None:
    """Load an adapter from disk; each rank of a sharded model loads its own shard."""
    saved = open_adapter(directory).tensors
    for name, parameter in adapter_parameters(model).items():
        local(parameter).copy_(own_shard(saved.read(name).to(parameter.device), parameter))


def merged_weight(layer: LoraLayer) -> Tensor:
    """Return a layer's weight with its pair added, unsharded and in float32; collective."""
    layers = (layer.base_layer, layer.lora_A[ADAPTER], layer.lora_B[ADAPTER])
    base, a, b = (full_tensor(part.get_parameter("weight").detach()) for part in layers)
    return merge_into(base, a, b, layer.scaling[ADAPTER])


def export_adapter(model: PreTrainedModel, directory: Path, *, writes: bool) -> None:
    """Write an adapter in peft's format; collective, one rank writes."""
    tensors = {name: full_tensor(value.detach()).cpu() for name, value in adapter_parameters(model).items()}
    if writes:
        export_adapter_settings(model, directory)
        save_file(tensors, directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def export_adapter_settings(model: PreTrainedModel, directory: Path) -> None:
    """Write adapter_config.json. As long as the directory has no config.json, transformers loads base and adapter."""
    directory.mkdir(parents=True, exist_ok=True)
    model.peft_config[ADAPTER].save_pretrained(directory)

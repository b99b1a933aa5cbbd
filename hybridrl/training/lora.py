"""LoRA (Hu et al. 2021): a model that stays as it is, with a pair of small matrices beside its linear layers which is
all that is trained.

peft makes the pairs; here stands which layers get one, where they begin, what a weight is with its pair, and how they
are written and read. The model itself may have no memory yet (meta device).
"""

import re
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hybridrl.checkpoint.adapter import ADAPTER, ADAPTER_WEIGHTS, merge_into, open_adapter
from hybridrl.config import ConfigError
from hybridrl.config.lora_checks import ALL_LINEAR
from hybridrl.config.names import nearest
from hybridrl.config.schema import ModelConfig
from hybridrl.training.adapted import adapter_parameters, pairs
from hybridrl.training.loading import load_settings
from hybridrl.training.model import HOST
from hybridrl.training.shards import whole

PATTERN = re.compile(r"[^\w.-]")  # what stands in a regular expression and in no name


def check_adapter(config: ModelConfig, key: str) -> str:
    """What is trained of how much, in words, from the configuration alone: no weights are read.

    Raises ConfigError where the model lacks the layers, or the adapter named is of another model.
    """
    settings = load_settings(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, trust_remote_code=config.trust_remote_code)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    add_adapter(model, config, torch.float32, 0, key)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    layers = ", ".join(sorted({name.rsplit(".", 2)[-2] for name in pairs(model)}))
    return (
        f"{key}: an adapter of rank {config.lora_rank} on {layers} is trained, {trained:,} parameters "
        f"({trained / parameters:.2%} of the model's {parameters:,})"
    )


def add_adapter(model: PreTrainedModel, config: ModelConfig, dtype: torch.dtype, seed: int, key: str) -> None:
    """Freeze a model that is not sharded yet, and put a new adapter of this type into it, in host memory: its B is
    zero, its A follows from the seed. A value head is trained as it is.

    Raises ConfigError as `check_adapter` does.
    """
    heads = _value_heads(model)
    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora.dropout,
        target_modules=_targets(model, config, heads, key),
        task_type="TOKEN_CLS" if heads else "CAUSAL_LM",
        base_model_name_or_path=config.path,
    )
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(settings, model, ADAPTER)
        torch.manual_seed(seed)
        for layer in pairs(model).values():  # anew: peft puts a pair where its layer is, which may be nowhere yet
            for half in (layer.lora_A, layer.lora_B):
                half[ADAPTER].to_empty(device=HOST).to(dtype)
            layer.reset_lora_parameters(ADAPTER, init_lora_weights=True)
    settings.inference_mode, settings.modules_to_save = True, heads or None  # as its file says
    for name in heads:
        model.get_submodule(name).requires_grad_(True)
        model.get_submodule(name).to(dtype)
    if config.lora_adapter_path:
        _refuse_other(model, config.lora_adapter_path, f"{key}.lora_adapter_path={config.lora_adapter_path}")


def _value_heads(model: PreTrainedModel) -> list[str]:
    """The linear layers on top of a model that gives values."""
    if model.can_generate():
        return []
    return [name for name, child in model.named_children() if isinstance(child, nn.Linear)]


def _targets(model: PreTrainedModel, config: ModelConfig, heads: list[str], key: str) -> list[str]:
    """The linear layers that get a pair: by the ends of their names where no other layer's name ends so."""
    tops = [model.get_output_embeddings(), *map(model.get_submodule, heads)]
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module not in tops]
    chosen = linear if config.target_modules == ALL_LINEAR else _named("target_modules", config, linear, key)
    excluded = _named("exclude_modules", config, linear, key)
    kept = [name for name in chosen if name not in excluded]
    if not kept:
        raise ConfigError(f"{key}.target_modules: no layer of {config.path} is left to adapt")
    ends = {_end(name) for name in kept}
    return sorted(ends) if kept == [name for name in linear if _end(name) in ends] else kept


def _named(option: str, config: ModelConfig, linear: list[str], key: str) -> list[str]:
    """The layers that an option names, each by the end of its name or by a regular expression of all of it.

    A name without a layer is refused. An expression may exclude none: one list serves models with and without a part.
    """
    wanted: list[str] = vars(config)[option]
    found: dict[str, None] = {}
    for text in wanted:
        try:
            pattern = re.compile(rf"(.*\.)?{re.escape(text)}|{text}")
        except re.error as error:
            raise ConfigError(f"{key}.{option}: {text} is no regular expression ({error})") from error
        matching = [name for name in linear if pattern.fullmatch(name)]
        if not matching and not (option == "exclude_modules" and PATTERN.search(text)):
            ends = sorted({_end(name) for name in linear})
            near = nearest(text.rsplit(".", 1)[-1], ends) if ends else []
            hint = f"nearest: {', '.join(near)}" if near else f"those that it has: {', '.join(ends) or 'none'}"
            raise ConfigError(f"{key}.{option}: {text} is no linear layer in {config.path}; {hint}")
        found |= dict.fromkeys(matching)
    return list(found)


def _end(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _refuse_other(model: PreTrainedModel, path: str, asked: str) -> None:
    """Refuse an adapter on disk that is not of this model."""
    saved, present = open_adapter(Path(path)).tensors, adapter_parameters(model)
    wrong = [f"it has no {name}" for name in present if name not in saved.meta]
    wrong += [f"it has {name}, which the model has no place for" for name in saved.meta if name not in present]
    wrong += [
        f"{name} is {list(saved.meta[name].shape)} there and {list(present[name].shape)} here"
        for name in present
        if name in saved.meta and saved.meta[name].shape != present[name].shape
    ]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ConfigError(f"{asked}: the adapter is of another model: {'; '.join(wrong[:3])}{more}")


@torch.no_grad()
def load_adapter(model: PreTrainedModel, directory: Path) -> None:
    """Take the values of an adapter on disk; of a sharded model each rank what it keeps."""
    saved = open_adapter(directory).tensors
    for name, parameter in adapter_parameters(model).items():
        value = saved.read(name).to(parameter.device)
        if isinstance(parameter, DTensor):
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(value)


def merged(layer: LoraLayer) -> Tensor:
    """A layer's weight with its pair added, whole and in float32; collective."""
    parts = (layer.base_layer.weight, layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight)
    return merge_into(*(whole(part.detach()) for part in parts), layer.scaling[ADAPTER])


# -- files -------------------------------------------------------------------------------------------------------------


def export_adapter(model: PreTrainedModel, directory: Path, *, writes: bool) -> None:
    """Write an adapter as peft does; collective."""
    tensors = {name: whole(value.detach()).cpu() for name, value in adapter_parameters(model).items()}
    if writes:
        export_adapter_settings(model, directory)
        save_file(tensors, directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def export_adapter_settings(model: PreTrainedModel, directory: Path) -> None:
    """Write adapter_config.json. Without the base's config.json beside it transformers loads base and adapter."""
    directory.mkdir(parents=True, exist_ok=True)
    model.peft_config[ADAPTER].save_pretrained(directory)

"""A model with LoRA adapters in it: which layers have a pair of matrices beside them, which parameters are whose, and
the model as it was without. Knows peft's layers, and not how they are made."""

from collections.abc import Iterator
from contextlib import contextmanager

from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from hybridrl.checkpoint.adapter import ADAPTER, file_name


def pairs(model: PreTrainedModel) -> dict[str, LoraLayer]:
    """The layers with a pair, by the name of their weight in the model as it was; none where it has no adapter."""
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))
    return {f"{name}.weight": layer for name, layer in layers}


def adapter_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """What is trained of an adapted model, by the names in peft's files."""
    return {file_name(name): value for name, value in model.named_parameters() if value.requires_grad}


@contextmanager
def adapter_off(model: PreTrainedModel) -> Iterator[None]:
    """To compute with the model as it was: pairs count nothing. (peft's own switch freezes their parameters too, and
    FSDP2 takes what a parameter is when it first gathers it for good.)"""
    layers = pairs(model).values()
    for layer in layers:
        layer.set_scale(ADAPTER, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(ADAPTER, 1.0)


@contextmanager
def without_pairs(model: PreTrainedModel) -> Iterator[None]:
    """To read and write the model as it was, under its own names: pairs are taken out for so long."""
    layers = {name.removesuffix(".weight"): layer for name, layer in pairs(model).items()}
    try:
        for name, layer in layers.items():
            model.set_submodule(name, layer.get_base_layer())
        yield
    finally:
        for name, layer in layers.items():
            model.set_submodule(name, layer)

"""What a layer computes in the backward pass once more, and how: recomputation of activations, and compilation."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

# Matrix products and attention, by the names of torch's operations.
COSTLY = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_grouped_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
}


def recompute_layers(model: PreTrainedModel, *, selective: bool) -> None:
    """Keep only the inputs of each layer for the backward pass; a selective recomputation keeps the results of COSTLY
    operations as well (Korthikanti et al. 2022).

    Raises ValueError where the model's family cannot recompute its layers.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _policy(_context: object, operation: Any, *_: object, **__: object) -> CheckpointPolicy:
    name = operation.name().partition(".")[0]
    return CheckpointPolicy.MUST_SAVE if name in COSTLY else CheckpointPolicy.PREFER_RECOMPUTE


def compile_layers(layers: list[nn.Module]) -> None:
    """Compile the forward pass of each layer for rows of any lengths; attention itself is not compiled."""
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)

"""Fixes for bugs of vLLM, applied in every process that imports this module."""

import importlib
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.activation import XIELU
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

# Arguments of an engine on CPU. On a processor with AMX, vLLM selects kernels for latent attention that support only
# bfloat16. They replace the weights by a packed copy, so that a weight sync does not find them.
CPU_ATTENTION = {"attention_backend": "CPU_MLA"} if "CPU_MLA" in AttentionBackendEnum.__members__ else {}


class Repaired:
    """vLLM's `worker_extension_cls`: it makes an engine's processes import this module."""


def _rotate_by_heads(rotary: type) -> None:
    """Use vLLM's native rotary embedding for a query [tokens, heads, head_dim]: its CPU kernel is wrong there if pairs
    are neighbours, as in DeepSeek's models."""
    kernel = rotary.forward_cpu

    def forward_cpu(
        self: torch.nn.Module, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return (kernel if query.dim() == 2 else rotary.forward_native)(self, positions, query, key)

    rotary.forward_cpu = forward_cpu


def _route_in_one_group(router: type) -> None:
    """Make vLLM's router on CPU select experts by sigmoids without groups (MiniMax-M2) as in a single group: it
    computes sigmoids only with groups."""
    compute = router._compute_routing

    def route(self: Any, *arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if self.scoring_func == "sigmoid" and not self.use_grouped_topk and self.custom_routing_function is None:
            self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1
        return compute(self, *arguments, **options)

    router._compute_routing = route


def _keep_parameters_in_the_models_type(activation: Any) -> None:
    """Create the parameters of Apertus' activation in the type of the model: vLLM rounds them to bfloat16."""
    create = activation.__init__

    def initialise(self: torch.nn.Module, *values: float, dtype: torch.dtype | None = None, **options: object) -> None:
        create(self, *values, dtype=dtype or torch.get_default_dtype(), **options)

    activation.__init__ = initialise


def _keep_the_normalisation_of_pixels(layer: Any) -> None:
    """Take the constants of vLLM's normalisation of pixels out of the model's weights: an engine begins with dummy
    weights, and would fill them with noise."""
    create = layer.__init__

    def initialise(self: torch.nn.Module, *values: Any, **options: Any) -> None:
        create(self, *values, **options)
        self._non_persistent_buffers_set.update(dict(self.named_buffers(recurse=False)))

    layer.__init__ = initialise


def _log_softmax(self: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Compute log-softmax without the bias of torch's own: on CPU that adds probabilities one after another in float32,
    and small ones are lost next to a large sum. Log-probs of 262,144 tokens are up to 6e-5 too high. Partial sums that
    are added in float64 give a row the same result alone and among others; logsumexp does not."""
    logits, dim = self.to(dtype or self.dtype), dim if dim < 0 else dim - self.ndim
    highest = logits.amax(dim, keepdim=True)
    parts = (logits - highest).exp_().unflatten(dim, (-1, 64 if logits.shape[dim] % 64 == 0 else 1)).sum(dim)
    return logits - (highest + parts.sum(dim, keepdim=True, dtype=torch.float64).log()).to(logits.dtype)


def name_weight_loaders(model: torch.nn.Module) -> None:
    """Call before a reload of weights: it reads the name of every weight's loader, and a partial function has none
    (MiniMax-M2)."""
    for tensor in (*model.parameters(), *model.buffers()):
        loader = getattr(tensor, "weight_loader", None)
        if isinstance(loader, partial):
            vars(loader)["__name__"] = "weight_loader"


_keep_parameters_in_the_models_type(XIELU)
with suppress(ImportError):  # since 0.32
    _keep_the_normalisation_of_pixels(
        importlib.import_module("vllm.model_executor.layers.fusion.mm_input_norm").FusedMMInputNorm
    )
if current_platform.is_cpu():
    torch.Tensor.log_softmax = _log_softmax  # every sampler of vLLM computes log-probs with it
    _rotate_by_heads(RotaryEmbedding)
    with suppress(ImportError):  # older versions have no such router
        _route_in_one_group(importlib.import_module("vllm.model_executor.layers.fused_moe.router.cpu_router").CPURouter)

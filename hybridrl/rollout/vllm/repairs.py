"""What vLLM gets wrong, or needs and does not use, put right in every process that imports this module."""

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import torch
from transformers.utils import is_torchvision_available
from vllm import ModelRegistry
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform

# Set where a text model of Qwen3.5 is served: its module in vLLM imports an image processor that needs torchvision. A
# CPU installation has none, and of what is imported a text model uses nothing.
WITHOUT_TORCHVISION = "HYBRIDRL_WITHOUT_TORCHVISION"
QWEN3_5 = "vllm.model_executor.models.qwen3_5"
TEXT_MODELS = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
IMAGE_PROCESSOR = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
STAND_INS = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


class Repaired:
    """Named as vLLM's `worker_extension_cls`, has this module imported in the processes of an engine."""


def prepare_for(directory: Path) -> None:
    """Call before an engine for this model is made: its processes inherit what is found."""
    file = directory / "config.json"
    wanted = json.loads(file.read_text(encoding="utf-8")).get("architectures") if file.is_file() else None
    if set(wanted or []) & set(TEXT_MODELS) and not is_torchvision_available():
        os.environ[WITHOUT_TORCHVISION] = "1"
        _import_without_torchvision()


def _import_without_torchvision() -> None:
    """Import the image processor with empty modules in the place of torchvision, and register the text models as
    classes: by their names vLLM would look at them in a process of its own, without what is imported here."""
    if is_torchvision_available():  # transformers remembers the answer: it never takes the stand-ins for the library
        return
    stand_ins = {name: ModuleType(name) for name in STAND_INS}
    stand_ins["torchvision.transforms.v2"].functional = stand_ins["torchvision.transforms.v2.functional"]
    sys.modules |= stand_ins
    try:
        importlib.import_module(IMAGE_PROCESSOR)
    finally:
        for name in STAND_INS:
            del sys.modules[name]
    module = importlib.import_module(QWEN3_5)
    for name in TEXT_MODELS:
        ModelRegistry.register_model(name, getattr(module, name))


def _rotate_by_heads(rotary: type) -> None:
    """vLLM's kernel for CPU rotates a query [tokens, heads, width] wrongly where pairs are neighbours, as DeepSeek's
    are; its own plain form is right."""
    in_kernel = rotary.forward_cpu

    def forward_cpu(
        self: torch.nn.Module, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return (in_kernel if query.dim() == 2 else rotary.forward_native)(self, positions, query, key)

    rotary.forward_cpu = forward_cpu


if current_platform.is_cpu():
    _rotate_by_heads(RotaryEmbedding)
if os.environ.get(WITHOUT_TORCHVISION):
    _import_without_torchvision()

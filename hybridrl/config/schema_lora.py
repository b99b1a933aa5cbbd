"""The keys of LoRA, which every model that is trained has; see schema.py."""

from dataclasses import dataclass
from typing import Annotated

from hybridrl.config.values import AdapterPath, Decay, Natural


@dataclass
class FurtherLoRAConfig:
    merge: bool
    dropout: Decay


@dataclass
class LoRAConfig:
    """Once settled, `lora_rank` is above 0 exactly where the model is trained through an adapter."""

    lora_rank: Natural
    lora_alpha: Natural
    target_modules: list[str]
    exclude_modules: list[str]
    lora_adapter_path: Annotated[str, AdapterPath()] | None
    lora: FurtherLoRAConfig

"""Writes a model as a run saves it: in shards, with settings in `huggingface` next to them."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from hybridrl.checkpoint.export import export_settings, own_tensors


def whole_model(config: PreTrainedConfig, *, value: bool = False) -> PreTrainedModel:
    """Return the model that `save_in_shards` saves, in float32."""
    torch.manual_seed(0)
    kind = AutoModelForTokenClassification if value else AutoModelForCausalLM
    model = kind.from_config(config)
    if not value:
        model.generation_config = GenerationConfig(eos_token_id=[3, 5], do_sample=False, temperature=0.5)
    return model


def load_all(kind: Any, directory: Path, **options: object) -> Any:
    """Load a model with a class of transformers; every tensor is in its files, and no other."""
    model, report = kind.from_pretrained(directory, output_loading_info=True, **options)
    assert not any(report[fault] for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def save_in_shards(
    directory: Path, config: PreTrainedConfig, *, value: bool = False, dtype: torch.dtype = torch.float32
) -> None:
    """Save the model from these ranks, with moments, each tensor sharded over all of them."""
    model = whole_model(config, value=value)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = {
        name: distribute_tensor(parameter.detach().to(dtype), mesh, [Shard(0)])
        for name, parameter in model.named_parameters()
    }
    moments = {name: {"exp_avg": tensor * 2, "step": torch.tensor(3.0)} for name, tensor in tensors.items()}
    dcp.save(
        {"model": own_tensors(model) | tensors, "optimizer": {"state": moments}, "extra": {"updates": 3}},
        checkpoint_id=directory,
    )
    if dist.get_rank() == 0:
        model.config.architectures = [type(model).__name__]
        export_settings(model, directory / "huggingface", dtype)
        (directory / "huggingface" / "chat_template.jinja").write_text("{{ messages }}")
        (directory / "huggingface" / "tokenizer.json").write_text("{}")

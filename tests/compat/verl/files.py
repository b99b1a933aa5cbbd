"""Writes what verl's FSDP workers write, from real FSDP1 and FSDP2 models, and the expected content next to it."""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import Shard
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    GenerationConfig,
    Qwen2Config,
)

UPDATES, SCHEDULE_STEPS = 2, 5
TRUTH = "truth.pt"


def qwen2(**changes: object) -> Qwen2Config:
    """Return a configuration with sizes of which few divide by 3: shards are uneven and flat parameters padded."""
    settings = {
        "vocab_size": 17,
        "hidden_size": 10,
        "intermediate_size": 14,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "tie_word_embeddings": False,
        "architectures": ["Qwen2ForCausalLM"],
    }
    return Qwen2Config(**settings | changes)


def save_as_verl(
    directory: Path, form: str, *, tied: bool = False, value: bool = False, like: Path | None = None
) -> None:
    """Train a model (`like`: of this one's configuration) for a few updates on these ranks and save it as verl does.
    `form`: fsdp2, fsdp2 replicated, fsdp2 columns, fsdp1, fsdp1 replicated, fsdp1 original parameters, fsdp1 sharded
    tensors."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(like) if like else qwen2(tie_word_embeddings=tied)
    config.num_labels = 1 if value else config.num_labels
    model = (AutoModelForTokenClassification if value else AutoModelForCausalLM).from_config(config)
    sharded = _fsdp2(model, form) if form.startswith("fsdp2") else _fsdp1(model, form)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1)
    for update in range(UPDATES):
        sharded(input_ids=torch.arange(6)[None] + update).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    directory.mkdir(parents=True, exist_ok=True)
    if form.startswith("fsdp1"):
        FullyShardedDataParallel.set_state_dict_type(sharded, StateDictType.SHARDED_STATE_DICT)
    kinds = {"model": sharded.state_dict(), "optim": optimizer.state_dict(), "extra_state": _extra_state(optimizer)}
    for kind, value in kinds.items():
        torch.save(value, directory / f"{kind}_world_size_{ranks}_rank_{rank}.pt")
    truth = get_state_dict(sharded, optimizer, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        torch.save(truth, directory / TRUTH)
        (directory / "fsdp_config.json").write_text(json.dumps({"FSDP_version": int(form[4]), "world_size": ranks}))
        config.save_pretrained(directory / "huggingface")
        generation = GenerationConfig(eos_token_id=[3, 5], do_sample=True, temperature=0.5)
        generation.save_pretrained(directory / "huggingface")
        (directory / "huggingface" / "chat_template.jinja").write_text("{{ messages }}")


def _fsdp2(model: Any, form: str) -> nn.Module:
    options: dict[str, object] = {"mesh": _mesh(replicas=2 if form == "fsdp2 replicated" else 1)}
    if form == "fsdp2 columns":
        options["shard_placement_fn"] = lambda parameter: Shard(parameter.dim() - 1)
    for layer in [*model.model.layers, *([] if model.config.tie_word_embeddings else [model.model.embed_tokens])]:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def _fsdp1(model: Any, form: str) -> nn.Module:
    layers, replicated = {type(layer) for layer in model.model.layers}, form == "fsdp1 replicated"
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls=layers),
        device_id=torch.device("cpu"),
        device_mesh=None if form == "fsdp1 sharded tensors" else _mesh(replicas=2 if replicated else 1),
        use_orig_params=form == "fsdp1 original parameters",
        sharding_strategy=ShardingStrategy.HYBRID_SHARD if replicated else ShardingStrategy.FULL_SHARD,
    )


def _mesh(replicas: int = 1) -> DeviceMesh:
    ranks = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    return init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("ddp", "fsdp"))


def _extra_state(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for _ in range(SCHEDULE_STEPS):
        schedule.step()
    rng = {"cpu": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}
    return {"lr_scheduler": schedule.state_dict(), "rng": rng}

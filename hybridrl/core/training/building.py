"""The models of a training rank: built without weights, sharded, loaded and checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from hybridrl.core.training import model as models
from hybridrl.core.training.attention import sequence_group
from hybridrl.core.training.fsdp import reshard, shard_and_fill
from hybridrl.core.training.layout import layout
from hybridrl.core.training.learner import Learner, ModelShard, RankModel
from hybridrl.core.training.loading import is_random
from hybridrl.core.training.lora import add_adapter, load_adapter
from hybridrl.core.training.model import LanguageModel
from hybridrl.core.training.optimizer import Optimizers
from hybridrl.core.training.routes import RouterReplay
from hybridrl.core.training.vision import Vision, family_of, freeze_tower

# By head.
BLANK = {
    "language": models.blank_language_model,
    "value": models.blank_value_model,
    "score": models.blank_score_model,
    "trained score": partial(models.blank_score_model, trained=True),
}


@dataclass(frozen=True)
class WorkerConfig:
    """The configuration of a training rank. Every rank builds and calls the models in their order; the policy's name is
    `actor`. Rows of skipped updates are written to the directory `skipped_updates`."""

    device: str
    models: Mapping[str, RankModel]
    collective_timeout: float
    seed: int
    skipped_updates: str
    replays_routes: bool = False


def build_shards(config: WorkerConfig, ranks: int, device: torch.device) -> dict[str, ModelShard]:
    """Return this rank's part of every model; collective."""
    shards: dict[str, ModelShard] = {}
    for name, entry in config.models.items():
        if entry.weights in ("live", "base"):
            actor = shards["actor"]
            options = {"vision": actor.vision, "shares": actor.shares}
            layout_of_actor = actor.padded, actor.group, actor.tensor_ranks
            shard = ModelShard(actor.model, entry.fsdp, device, *layout_of_actor, entry.reads, **options)
        else:
            shard = _load_shard(name, config, ranks, device, shards)
            _check(name, config, shard, {config.models[other].model.path: shards[other].shares for other in shards})
            reshard(shard.model)
        shards[name] = shard
    return shards


def _load_shard(
    name: str, config: WorkerConfig, ranks: int, device: torch.device, others: Mapping[str, ModelShard]
) -> ModelShard:
    """Shard a model without weights, with its adapter if it has one, and load it; create the optimizers of a model that
    is trained."""
    entry = config.models[name]
    section, fsdp = entry.model, entry.fsdp
    model = BLANK[entry.head](section, entry.storage_dtype)
    if family_of(model.model.config) and (entry.vision is None or entry.vision.frozen):
        freeze_tower(model.model)  # without pictures it has no gradient
    if entry.vision is not None:
        model.vision = Vision(entry.vision, model.model)
    meshes = layout(config.device, ranks, fsdp.fsdp_size, fsdp.tensor_parallel_size, fsdp.expert_parallel_size)
    if section.lora_rank:
        add_adapter(model.model, section, getattr(torch, fsdp.model_dtype), config.seed, f"the {name}'s model")
    if entry.weights in ("copy", "average"):
        _check_shapes(model, others["actor"].model, section.path, config.models["actor"].model.path)
    if entry.trained is None:
        model = model.requires_grad_(False).eval()
    model = shard_and_fill(model, section.path, fsdp, meshes, device, offloaded=fsdp.offload_policy)
    if section.lora_rank and section.lora_adapter_path:
        load_adapter(model.model, Path(section.lora_adapter_path))
    optimizers = _optimizers(model, entry, device)  # before a forward pass, which gathers the parameters
    group = sequence_group(fsdp.ulysses_sequence_parallel_size, config.collective_timeout, meshes.tensor_ranks)
    # Rows alone have random numbers of their own; what they share would have them once.
    shares = section.use_remove_padding and not is_random(model.model, section)
    if group is None:
        shares = shares and not models.packed_rows_interact(model, device, shares=True)
    padded = not section.use_remove_padding
    if group is None and not (padded or shares):
        padded = models.packed_rows_interact(model, device)
    ahead = 0 if entry.head.endswith("score") else 1
    layout_of_rows = padded, group, meshes.tensor_ranks, entry.reads, ahead, model.vision, shares
    shard = ModelShard(model, fsdp, device, *layout_of_rows)
    if optimizers is None:
        return shard
    return Learner(**vars(shard), optimizers=optimizers, dump_prefix=Path(config.skipped_updates, name))


def _optimizers(model: nn.Module, entry: RankModel, device: torch.device) -> Optimizers | None:
    """Return the optimizers of a sharded model; None if it is frozen."""
    if (trained := entry.trained) is None:
        return None
    # Under offload_policy the optimizer steps in host memory, where parameters and moments already are.
    offloaded = entry.fsdp.optimizer_offload and not entry.fsdp.offload_policy and device.type == "cuda"
    updates = trained.total_updates, entry.compute_dtype, trained.updates_per_step
    return Optimizers(model, trained.optimizer, *updates, offloaded=offloaded)


def _check(name: str, config: WorkerConfig, shard: ModelShard, checked: Mapping[str, bool]) -> None:
    """Check that a language model computes the same as its own forward pass, except for a path among those checked. If
    it does only while rows share no tokens, they do not, nor do those of other models of this path."""
    shard.shares = shard.shares and checked.get(config.models[name].model.path, True)
    entry, options = config.models[name], {"padded": shard.padded, "group": shard.group}
    if isinstance(shard.model, LanguageModel) and entry.model.path not in checked:
        check = partial(models.check_log_probs, shard.model, entry.compute_dtype, shard.device, **options)
        try:
            check(shares=shard.shares)
        except ValueError:
            if not shard.shares:
                raise
            check(shares=False)
            shard.shares = False
        if config.replays_routes and name == "actor":
            reshard(shard.model)
            shard.model.replay = RouterReplay(shard.model.model)
            models.check_replay(shard.model, shard.device, **options)


def _check_shapes(model: nn.Module, policy: nn.Module, path: str, policy_path: str) -> None:
    ours, theirs = ([(name, value.shape) for name, value in each.named_parameters()] for each in (model, policy))
    if ours != theirs:
        raise ValueError(
            f"actor_rollout_ref.ref.refresh_freq: the reference {path} has other shapes than the policy {policy_path}, "
            "so it cannot become a copy of it; set refresh_freq=-1"
        )

"""The division of a model's parameters over the training ranks: the meshes of FSDP, tensor and expert parallelism.

Dense parameters are on the grid (fsdp, tensor), experts on (fsdp, expert), of the same ranks. Ranks of a tensor group
have the same rows and each a part of the heads and of the width of every layer (Shoeybi et al. 2019); ranks of an
expert group have different rows, and send each token to the rank that has its experts (Lepikhin et al. 2020). Modules
that the family's plan in transformers does not name, embeddings and head are sharded by FSDP alone.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    TensorParallelLayer,
    apply_expert_parallelism,
    apply_tensor_parallelism,
)

from hybridrl.config.catalog import NO_PLAN
from hybridrl.config.findings import ConfigError
from hybridrl.core import device as devices

DISPATCH = "ep_dispatch_experts"  # a plan's style of a module that sends its tokens to other ranks
SUMMED = "replicated_with_grad_allreduce"


@dataclass(frozen=True)
class Layout:
    """The meshes of a model's parameters. `dense` is FSDP's mesh: one dimension of shards, or replicas of them."""

    dense: DeviceMesh
    tensor: DeviceMesh | None = None
    experts: DeviceMesh | None = None  # FSDP's mesh of the experts
    expert: DeviceMesh | None = None

    @property
    def tensor_ranks(self) -> int:
        """Return the number of ranks with the same rows."""
        return self.tensor.size() if self.tensor else 1


@cache
def layout(device: str, ranks: int, shards: int, tensor: int = 1, expert: int = 1) -> Layout:
    """Return the meshes over all ranks. `shards` ranks together have the dense parameters, each layer in `tensor`
    parts; `expert` ranks share the experts. Collective, as it creates process groups."""
    if tensor == 1 and shards == ranks:
        dense, parts = init_device_mesh(device, (ranks,), mesh_dim_names=("shard",)), None
    elif tensor == 1:
        dense, parts = _grid(device, (ranks // shards, shards), ("replicate", "shard")), None
    else:
        grid = _grid(device, (ranks // tensor, tensor), ("shard", "tensor"))
        dense, parts = grid["shard"], grid["tensor"]
    if expert == 1:
        return Layout(dense, parts)
    of_experts = _grid(device, (ranks // expert, expert), ("shard", "expert"))
    return Layout(dense, parts, of_experts["shard"], of_experts["expert"])


def _grid(device: str, shape: Sequence[int], names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh of two dimensions; its process groups have the configured timeout."""
    ranks = torch.arange(math.prod(shape)).view(*shape)
    timeout = devices.collective_timeout()
    subgroups = (dist.new_subgroups_by_enumeration(part.tolist(), timeout=timeout)[0] for part in (ranks.T, ranks))
    groups = list(map(devices.own_group, subgroups))
    return DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=names)


def cut(model: PreTrainedModel, meshes: Layout) -> list[nn.Module]:
    """Cut a model without weights in place by its family's plan, before FSDP shards each rank's part. Return the
    modules of experts, to be sharded by FSDP over `meshes.experts`. Raises ConfigError for a family without a plan."""
    if meshes.tensor is not None:
        apply_tensor_parallelism(model, meshes.tensor, tensor_plan(model))
    if meshes.expert is None:
        return []
    plan = expert_plan(model)
    sharing: Any = meshes.tensor  # None, which transformers' types lack, if every rank has different tokens
    apply_expert_parallelism(model, meshes.expert, sharing, plan)
    return [module for name, module in model.named_modules() if style_of(name, plan) == DISPATCH]


def style_of(name: str, plan: Mapping[str, str]) -> str:
    """Return the style of a module or parameter in a plan, empty if it has none. In a plan, a star is a number."""
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), "")


def division(model: PreTrainedModel, tensor: int, expert: int) -> dict[str, tuple[int, str]]:
    """Return for each parameter the number of parts into which `cut` divides it, and the style; needs no process
    groups. FSDP then shards each part. Raises ConfigError as `cut` does."""
    by_tensor, by_expert = tensor_plan(model) if tensor > 1 else {}, expert_plan(model) if expert > 1 else {}
    parts = {}
    for name, parameter in model.named_parameters():
        module = name.rpartition(".")[0]
        style = style_of(name, by_tensor) or style_of(module, by_tensor)
        cuts = style and type(ALL_PARALLEL_STYLES[style]).shard_param is not TensorParallelLayer.shard_param
        if style_of(module, by_expert) == DISPATCH:
            parts[name] = expert, DISPATCH
        elif cuts and not (parameter.ndim == 1 and "rowwise" in style):  # a bias that is added once
            parts[name] = tensor, style
        else:
            parts[name] = 1, ""
    return parts


def tensor_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return the family's plan of tensor parallelism for its layers, without their experts, which are never cut. Raises
    ConfigError if there is none."""
    experts = [name for name, style in model.tp_plan.items() if style == "moe_tp_experts"]
    plan = {
        name: style
        for name, style in model.tp_plan.items()
        if ".layers." in f".{name}" and not any(name.startswith(module) for module in experts)
    }
    if not plan:
        raise _no_plan("tensor", model)
    # Each rank normalises its own heads, so the gradient of such a weight is the sum over ranks. Some plans (that of
    # Qwen3-VL-MoE) leave it out.
    norms = {name for name, _ in model.named_modules() if name.endswith(("self_attn.q_norm", "self_attn.k_norm"))}
    divided = {name for name in norms if style_of(name.replace("_norm", "_proj"), plan) == "colwise"}
    return {re.sub(r"\.\d+(?=\.)", ".*", name): SUMMED for name in divided} | plan


def expert_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return the family's plan of expert parallelism. Raises ConfigError if there is none."""
    if DISPATCH not in model.ep_plan.values():
        raise _no_plan("expert", model)
    return dict(model.ep_plan)


def _no_plan(kind: str, model: PreTrainedModel) -> ConfigError:
    fix = f"set {kind}_parallel_size=1, and shard with FSDP alone"
    return ConfigError(NO_PLAN.format(kind, model.config.model_type), fix=fix)


def shard_experts(experts: nn.Module, meshes: Layout, options: Mapping[str, Any]) -> None:
    """Shard a layer's part of the experts over the ranks that have the same part."""
    assert meshes.experts is not None
    sharding: dict[str, Any] = {**options, "mesh": meshes.experts}
    fsdp2.fully_shard(experts, **sharding)
    assert isinstance(experts, fsdp2.FSDPModule)
    # An expert has the tokens of all rows. Its gradient is therefore divided by the same number as a dense parameter's:
    # the ranks with different rows. Only NCCL can divide by a number other than the group's size while it reduces;
    # elsewhere FSDP must divide afterwards. On a single rank it would do both, and divide the gradient twice.
    experts.set_gradient_divide_factor(float(dist.get_world_size() // meshes.tensor_ranks))
    if meshes.experts.device_type != "cuda" and meshes.experts.size() > 1:
        experts.set_force_sum_reduction_for_comms(True)

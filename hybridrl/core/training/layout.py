"""The division of a model's parameters over the training ranks: the meshes of FSDP, tensor and expert parallelism.

Dense parameters lie on the grid (fsdp, tensor), experts on (fsdp, expert), over the same ranks. Ranks of a tensor group
have the same rows and each a part of the heads and of the width of every layer (Shoeybi et al. 2019); ranks of an
expert group have rows of their own, and send each token to the rank that has its experts (Lepikhin et al. 2020). What a
family's plan in transformers does not name, and embeddings and head, is only sharded by FSDP.
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
from torch.distributed.tensor import DTensor
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

DISPATCH = "ep_dispatch_experts"  # of a plan: the module whose tokens are sent to other ranks


@dataclass(frozen=True)
class Layout:
    """The meshes of a model's parameters. `dense` is that of FSDP: one dimension of shards, or replicas of them."""

    dense: DeviceMesh
    tensor: DeviceMesh | None = None
    experts: DeviceMesh | None = None  # FSDP's of the experts
    expert: DeviceMesh | None = None

    @property
    def tensor_ranks(self) -> int:
        """Return how many ranks have the same rows."""
        return self.tensor.size() if self.tensor else 1


@cache
def layout(device: str, ranks: int, shards: int, tensor: int = 1, expert: int = 1) -> Layout:
    """Return the meshes over all ranks: `shards` ranks together have the dense parameters, in `tensor` parts of each
    layer, and `expert` ranks share the experts; collective, as it makes groups."""
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
    """Return a mesh of two dimensions, whose groups have the configured limit of time."""
    ranks = torch.arange(math.prod(shape)).view(*shape)
    timeout = devices.collective_timeout()
    made = (dist.new_subgroups_by_enumeration(part.tolist(), timeout=timeout)[0] for part in (ranks.T, ranks))
    groups = list(map(devices.own_group, made))
    return DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=names)


def cut(model: PreTrainedModel, meshes: Layout) -> list[nn.Module]:
    """Cut a model without weights in place by its family's plan, before FSDP shards what is left; return the modules
    of experts that FSDP has to shard over `meshes.experts`. Raises ConfigError for a family without a plan."""
    if meshes.tensor is not None:
        apply_tensor_parallelism(model, meshes.tensor, tensor_plan(model))
    if meshes.expert is None:
        return []
    plan = expert_plan(model)
    sharing: Any = meshes.tensor  # None, which transformers' types do not say: every rank has tokens of its own
    apply_expert_parallelism(model, meshes.expert, sharing, plan)
    return [module for name, module in model.named_modules() if style_of(name, plan) == DISPATCH]


def style_of(name: str, plan: Mapping[str, str]) -> str:
    """Return a module's or parameter's style in a plan, in whose names a star is a number; empty if it has none."""
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), "")


def division(model: PreTrainedModel, tensor: int, expert: int) -> dict[str, tuple[int, str]]:
    """Return into how many parts `cut` cuts each parameter, without groups of ranks, and the style by which it does;
    FSDP then shards what each of so many ranks has. Raises ConfigError as `cut` does."""
    by_tensor, by_expert = tensor_plan(model) if tensor > 1 else {}, expert_plan(model) if expert > 1 else {}
    found = {}
    for name, parameter in model.named_parameters():
        module = name.rpartition(".")[0]
        style = style_of(name, by_tensor) or style_of(module, by_tensor)
        cuts = style and type(ALL_PARALLEL_STYLES[style]).shard_param is not TensorParallelLayer.shard_param
        if style_of(module, by_expert) == DISPATCH:
            found[name] = expert, DISPATCH
        elif cuts and not (parameter.ndim == 1 and "rowwise" in style):  # a bias that is added once
            found[name] = tensor, style
        else:
            found[name] = 1, ""
    return found


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
    return plan


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
    # An expert has the tokens of all rows, so its gradient is divided by as many ranks as a dense one's: those with
    # rows of their own. Only NCCL can divide by another number than that of the ranks while it adds; elsewhere FSDP
    # must divide afterwards. On a single rank it does both, and the gradient would be divided twice.
    experts.set_gradient_divide_factor(float(dist.get_world_size() // meshes.tensor_ranks))
    if meshes.experts.device_type != "cuda" and meshes.experts.size() > 1:
        experts.set_force_sum_reduction_for_comms(True)


def by_mesh(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters by their mesh, as torch computes with those of one mesh at a time."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(groups.values())

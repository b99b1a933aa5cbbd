"""Optimizers and learning-rate schedules from their configuration."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hybridrl.config.schema import OptimizerConfig
from hybridrl.training.loss_scale import LossScale
from hybridrl.training.muon import Muon
from hybridrl.training.shards import host_places

MOMENTS: dict[type[Optimizer], tuple[str, ...]] = {AdamW: ("exp_avg", "exp_avg_sq"), Muon: ("momentum_buffer",)}


class Optimizers:
    """One or two optimizers that step together, each with the same schedule relative to its own learning rate, and the
    scale of the loss whose gradient they take, which depends on the type of the computation. With `offloaded` the
    moments are in host memory from the start, and on the parameters' device only while `step` runs."""

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        total_updates: int,
        dtype: torch.dtype = torch.float32,
        updates_per_step: int = 1,
        *,
        offloaded: bool = False,
    ) -> None:
        self.loss_scale = LossScale(dtype)
        self.offloaded = offloaded
        self.optimizers = build_optimizers(model, config, offloaded=offloaded)
        self.factor = lambda update: schedule(update, total_updates, config, updates_per_step)
        self.go_on_after(0)

    def go_on_after(self, updates: int) -> None:
        """Put the schedules where they stand after so many updates."""
        self.schedules = [LambdaLR(item, self.factor, last_epoch=updates - 1) for item in self.optimizers]

    @property
    def updates(self) -> int:
        """How many there were, skipped ones too."""
        return self.schedules[0].last_epoch

    @property
    def lr(self) -> float:
        return self.schedules[0].get_last_lr()[0]

    def step(self) -> None:
        for optimizer, schedule_ in zip(self.optimizers, self.schedules, strict=True):
            with _moments_on_device(optimizer) if self.offloaded else nullcontext():
                optimizer.step()
            schedule_.step()

    def skip(self) -> None:
        """Let an update go by without changing the model; the schedule moves on."""
        for schedule_ in self.schedules:
            schedule_.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)


@contextmanager
def _moments_on_device(optimizer: Optimizer) -> Iterator[None]:
    """Copies of the moments on the parameters' device, whose values return to host memory in the end. Copies run in the
    order of the device's stream; who reads the host's side has to synchronise with it."""
    hosts = {parameter: dict(state) for parameter, state in optimizer.state.items()}
    for parameter, state in hosts.items():
        moved = {name: state[name].to(parameter.device, non_blocking=True) for name in MOMENTS[type(optimizer)]}
        optimizer.state[parameter].update(moved)
    yield
    for parameter, state in hosts.items():
        for name in MOMENTS[type(optimizer)]:
            state[name].copy_(optimizer.state[parameter][name], non_blocking=True)
        optimizer.state[parameter].update({name: state[name] for name in MOMENTS[type(optimizer)]})


def build_optimizers(model: nn.Module, config: OptimizerConfig, *, offloaded: bool = False) -> list[Optimizer]:
    """AdamW for everything, or Muon for the layers' matrices and AdamW for the rest (Jordan et al. 2024)."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matrices = [p for name, p in named if p.ndim == 2 and _in_layer(name)] if config.optimizer == "Muon" else []
    taken = {id(parameter) for parameter in matrices}
    optimizers: list[Optimizer] = [_adamw((p for _, p in named if id(p) not in taken), config)]
    if matrices:
        optimizers.append(
            Muon(matrices, lr=config.muon_lr, momentum=config.muon_momentum, weight_decay=config.weight_decay)
        )
    for optimizer in optimizers:
        _set_moments_to_zero(optimizer, offloaded=offloaded)
    return optimizers


def _adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> AdamW:
    parameters, betas, more = list(parameters), (config.betas[0], config.betas[1]), config.override_optimizer_config
    # One kernel per parameter: five times as fast on a CPU as torch's own choice there, and on CUDA without the further
    # copy of a moment that torch's choice there (foreach) makes in each step.
    fused = None if more.get("foreach") else True
    return AdamW(parameters, lr=config.lr, betas=betas, weight_decay=config.weight_decay, **{"fused": fused} | more)


def _set_moments_to_zero(optimizer: Optimizer, *, offloaded: bool) -> None:
    """Make the moments as the first step would, so that the state has the same names and shapes at any time."""
    parameters, names = optimizer.param_groups[0]["params"], MOMENTS[type(optimizer)]
    every = [parameter for parameter in parameters for _ in names]
    device = parameters[0].device.type if parameters else "cpu"
    moments = iter(host_places(every, device) if offloaded else [torch.empty_like(parameter) for parameter in every])
    for parameter in parameters:
        state = {name: next(moments).detach().zero_() for name in names}
        if isinstance(optimizer, AdamW):
            # The fused kernel counts on the parameters' device.
            where = parameter.device if optimizer.param_groups[0]["fused"] else "cpu"
            state["step"] = torch.zeros((), device=where)
        optimizer.state[parameter] = state


def _in_layer(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def schedule(update: int, total_updates: int, config: OptimizerConfig, updates_per_step: int = 1) -> float:
    """The factor on the learning rate at an update, counted from 0: linear warm-up, then constant, linear or cosine."""
    warmup = _warmup(total_updates, config, updates_per_step)
    if update < warmup:
        return (update + 1) / warmup
    done = min((update - warmup) / max(total_updates - warmup, 1), 1.0)
    if config.lr_scheduler_type == "constant":
        return 1.0
    if config.lr_scheduler_type == "linear":
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * (1 - done)
    wave = 0.5 * (1 + math.cos(2 * math.pi * config.num_cycles * done))
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * wave


def _warmup(total_updates: int, config: OptimizerConfig, updates_per_step: int) -> int:
    """Updates of the warm-up. Configured in steps of the trainer, as in verl, though the rate rises at every update."""
    steps = config.lr_warmup_steps or 0.0
    return round(steps * updates_per_step) if steps > 0 else int(config.lr_warmup_steps_ratio * total_updates)

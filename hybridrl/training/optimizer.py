"""Optimizers and learning-rate schedules from their configuration."""

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hybridrl.config.schema import OptimizerConfig
from hybridrl.training.loss_scale import LossScale
from hybridrl.training.muon import Muon

MOMENTS: dict[type[Optimizer], tuple[str, ...]] = {AdamW: ("exp_avg", "exp_avg_sq"), Muon: ("momentum_buffer",)}


class Optimizers:
    """One or two optimizers that step together, each with the same schedule relative to its own learning rate, and the
    scale of the loss whose gradient they take, which depends on the type of the computation."""

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        total_updates: int,
        dtype: torch.dtype = torch.float32,
        updates_per_step: int = 1,
    ) -> None:
        self.loss_scale = LossScale(dtype)
        self.optimizers = build_optimizers(model, config)
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
            optimizer.step()
            schedule_.step()

    def skip(self) -> None:
        """Let an update go by without changing the model; the schedule moves on."""
        for schedule_ in self.schedules:
            schedule_.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def to(self, device: torch.device) -> None:
        """Move the moments."""
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.dim() > 0:
                        state[key] = value.to(device, non_blocking=True)


def build_optimizers(model: nn.Module, config: OptimizerConfig) -> list[Optimizer]:
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
        _set_moments_to_zero(optimizer)
    return optimizers


def _adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> AdamW:
    parameters, betas, more = list(parameters), (config.betas[0], config.betas[1]), config.override_optimizer_config
    on_cpu = all(parameter.device.type == "cpu" for parameter in parameters)
    # On CPU torch does not choose its one kernel a parameter by itself, which is five times as fast.
    fused = True if on_cpu and not more.get("foreach") else None
    return AdamW(parameters, lr=config.lr, betas=betas, weight_decay=config.weight_decay, **{"fused": fused} | more)


def _set_moments_to_zero(optimizer: Optimizer) -> None:
    """As its first step would: so the state has the same names and shapes at any time, saved or read."""
    for parameter in optimizer.param_groups[0]["params"]:
        state = {name: torch.zeros_like(parameter) for name in MOMENTS[type(optimizer)]}
        if isinstance(optimizer, AdamW):
            state["step"] = torch.tensor(0.0)
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

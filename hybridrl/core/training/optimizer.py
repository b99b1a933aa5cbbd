"""Optimizers, loss scaling and learning rates from their configuration."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from hybridrl.config.custom_code import load_function
from hybridrl.config.schema import OptimizerConfig
from hybridrl.core.algorithms.algorithm import bind
from hybridrl.core.training.fsdp import full_tensor, host_copies, local, own_shard

# Coefficients of Muon's quintic iteration, from the author's description: steepest at zero, not exact at one.
A, B, C = 3.4445, -4.7750, 2.0315
ITERATIONS = 5
FIRST_LOSS_SCALE, GROWTH_INTERVAL = 2.0**16, 200


class Optimizers:
    """One or two optimizers that step together, each with the same schedule relative to its own learning rate, and the
    loss scale, which depends on the type of the computation. With `offloaded` the moments are in host memory from the
    start, and on the parameters' device only during `step`."""

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
        self.loss_scale, self.offloaded = LossScale(dtype), offloaded
        self.skip_zero_gradient = config.skip_zero_gradient
        self.optimizers = build_optimizers(model, config, offloaded=offloaded)
        self.highest = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]
        self.factor = lambda update: schedule(update, total_updates, config, updates_per_step)
        self.resume_after(0)

    def resume_after(self, updates: int) -> None:
        """Set the learning rates to those after this number of updates; skipped ones count."""
        self.updates, factor = updates, self.factor(updates)
        for optimizer, highest in zip(self.optimizers, self.highest, strict=True):
            optimizer.param_groups[0]["lr"] = highest * factor

    @property
    def lr(self) -> float:
        return self.optimizers[0].param_groups[0]["lr"]

    def step(self) -> None:
        for optimizer in self.optimizers:
            with _moments_on_device(optimizer) if self.offloaded else nullcontext():
                optimizer.step()
        self.skip()

    def skip(self) -> None:
        """Skip an update: the model stays as it is, the schedule advances."""
        self.resume_after(self.updates + 1)

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)


class LossScale:
    """Keeps float16 gradients within range (Micikevicius et al. 2018); the factor is 1, without effect, in other types.
    The loss is multiplied by the factor before the backward pass and the gradient divided by it afterwards, since small
    gradients would vanish. If the gradient overflows, the factor is halved and the mini-batch repeated."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.adapts = dtype == torch.float16
        self.factor = FIRST_LOSS_SCALE if self.adapts else 1.0
        self.finite_updates = 0  # since the factor last changed

    def undo(self, model: nn.Module) -> None:
        """Divide the gradients by the factor."""
        if self.factor != 1:
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            torch._foreach_mul_(gradients, 1 / self.factor)

    def shrink(self) -> bool:
        """Halve the factor after a gradient that is not finite. Returns whether to retry: not if it was already 1."""
        shrunk = self.factor > 1
        self.factor, self.finite_updates = max(self.factor / 2, 1.0), 0
        return shrunk

    def grow(self) -> None:
        """Count a finite update; enough of them in a row double the factor."""
        self.finite_updates += 1
        if self.adapts and self.finite_updates == GROWTH_INTERVAL:
            self.factor, self.finite_updates = self.factor * 2, 0

    def state(self) -> dict[str, float]:
        return {"loss_scale": self.factor, "sound_updates": self.finite_updates} if self.adapts else {}

    def load(self, state: dict[str, float]) -> None:
        self.factor = state.get("loss_scale", self.factor)
        self.finite_updates = int(state.get("sound_updates", 0))


class ShardedAdamW(AdamW):
    """AdamW that steps on this rank's shards: through DTensor the host would take several times as long. Parameters and
    moments stay DTensors, so that checkpoints know how they are sharded."""

    def _init_group(self, group, params_with_grad, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps) -> bool:
        # It fills these lists with the tensors of a step.
        lists = params_with_grad, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps
        is_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local, tensors)
        return is_complex


class Muon(Optimizer):
    """Muon (Jordan et al. 2024): orthogonalised momentum as the update of a matrix, unsharded or sharded by FSDP2; with
    Nesterov momentum and decoupled weight decay. torch's own Muon iterates on shards: two ranks take another step
    than one (6% apart), and every product of the iteration is a collective. Here a matrix is gathered once."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        lr, momentum = group["lr"], group["momentum"]
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            average = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter.grad))
            average.lerp_(parameter.grad, 1 - momentum)
            direction = orthogonalise(full_tensor(parameter.grad.lerp(average, momentum)))
            # Without this scale the update of a tall matrix would be small relative to its entries.
            scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
            decayed = local(parameter).mul_(1 - lr * group["weight_decay"])
            decayed.add_(own_shard(direction, parameter), alpha=-lr * scale)


def orthogonalise(matrix: Tensor) -> Tensor:
    """Return roughly U V^T of the singular value decomposition [rows, columns], by a Newton-Schulz iteration; in
    bfloat16 on CUDA."""
    # A CPU without bfloat16 instructions multiplies bfloat16 at a twentieth of the speed.
    wide = matrix.bfloat16() if matrix.is_cuda else matrix.float()
    tall = wide.shape[0] > wide.shape[1]
    wide = wide.mT if tall else wide
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = wide @ wide.mT
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=B, alpha=C), wide, beta=A)
    return (wide.mT if tall else wide).to(matrix.dtype)


MOMENTS: dict[type[Optimizer], tuple[str, ...]] = {ShardedAdamW: ("exp_avg", "exp_avg_sq"), Muon: ("momentum_buffer",)}


@contextmanager
def _moments_on_device(optimizer: Optimizer) -> Iterator[None]:
    """Copy the moments to the parameters' device, and their values back at the end. Copies are ordered on the device's
    stream; a reader of the host's copy must synchronise with it."""
    names = MOMENTS[type(optimizer)]
    hosts = {parameter: dict(state) for parameter, state in optimizer.state.items()}
    for parameter, state in hosts.items():
        moved = {name: state[name].to(parameter.device, non_blocking=True) for name in names}
        optimizer.state[parameter].update(moved)
    yield
    for parameter, state in hosts.items():
        for name in names:
            state[name].copy_(optimizer.state[parameter][name], non_blocking=True)
        optimizer.state[parameter].update({name: state[name] for name in names})


def build_optimizers(model: nn.Module, config: OptimizerConfig, *, offloaded: bool = False) -> list[Optimizer]:
    """Return AdamW for all parameters, or Muon for the matrices of layers and AdamW for the rest."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matrices = []
    if config.optimizer == "Muon":
        matrices = [p for name, p in named if p.ndim == 2 and any(part.isdigit() for part in name.split("."))]
    taken, decay = {id(parameter) for parameter in matrices}, config.weight_decay
    # On a CPU the fused kernel is five times as fast as torch's default. On CUDA it avoids the extra copy of a moment
    # that torch's default (foreach) makes in each step.
    options: dict[str, Any] = {"fused": None if config.override_optimizer_config.get("foreach") else True}
    options |= config.override_optimizer_config
    rest, betas = [p for _, p in named if id(p) not in taken], (config.betas[0], config.betas[1])
    optimizers: list[Optimizer] = [ShardedAdamW(rest, lr=config.lr, betas=betas, weight_decay=decay, **options)]
    if matrices:
        optimizers.append(Muon(matrices, lr=config.muon_lr, momentum=config.muon_momentum, weight_decay=decay))
    for optimizer in optimizers:
        _create_moments(optimizer, offloaded=offloaded)
    return optimizers


def _create_moments(optimizer: Optimizer, *, offloaded: bool) -> None:
    """Create the moments as the first step would, so that the state always has the same names and shapes."""
    parameters, names = optimizer.param_groups[0]["params"], MOMENTS[type(optimizer)]
    every = [parameter for parameter in parameters for _ in names]
    device = parameters[0].device.type if parameters else "cpu"
    moments = iter(host_copies(every, device) if offloaded else map(torch.empty_like, every))
    for parameter in parameters:
        optimizer.state[parameter] = state = {name: next(moments).detach().zero_() for name in names}
        if isinstance(optimizer, AdamW):  # the fused kernel keeps its step count on the parameters' device
            place = parameter.device if optimizer.param_groups[0]["fused"] else "cpu"
            state["step"] = torch.zeros((), device=place)


# -- the learning rate, as a factor of its configured value ------------------------------------------------------------


def schedule(update: int, total_updates: int, config: OptimizerConfig, updates_per_step: int = 1) -> float:
    """Return the learning-rate factor at an update, counted from 0: a linear warm-up, then the configured schedule."""
    # Warm-up is configured in steps of the trainer, as in verl, though the rate rises at every update.
    steps = config.lr_warmup_steps or 0.0
    warmup = round(steps * updates_per_step) if steps > 0 else int(config.lr_warmup_steps_ratio * total_updates)
    if update < warmup:
        return (update + 1) / warmup
    after, rest, least = update - warmup, max(total_updates - warmup, 1), config.min_lr_ratio or 0.0
    match config.lr_scheduler_type:
        case "constant":
            return 1.0
        case "inverse_sqrt":
            return max(math.sqrt(max(warmup, 1) / (update + 1)), least)
        case "linear":
            share = 1 - min(after / rest, 1.0)
        case "cosine":
            share = _wave(after / rest, config.num_cycles)
        case "wsd":
            stable = int(config.stable_ratio * rest)
            if after < stable:
                return 1.0
            share = _wave((after - stable) / max(rest - stable, 1), config.num_cycles)
        case _:
            return custom_schedule(config)(after, rest)
    return least + (1 - least) * share


def _wave(done: float, cycles: float) -> float:
    """Return the cosine's value between 1 and 0 when this share of its periods is done."""
    return 0.5 * (1 + math.cos(2 * math.pi * cycles * min(done, 1.0)))


def custom_schedule(config: OptimizerConfig, key: str = "optim.lr_scheduler_type") -> Callable[[int, int], Any]:
    """Return the custom function of the updates since warm-up and of their total, with its parameters bound."""
    return bind(_loaded(config.lr_scheduler_type, key), vars(config), rows=2)


@cache
def _loaded(name: str, key: str) -> Callable[..., Any]:
    return load_function(name, key)

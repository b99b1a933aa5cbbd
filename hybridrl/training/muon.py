"""Muon (Jordan et al. 2024): momentum, made orthogonal by a Newton-Schulz iteration, as the update of a matrix.

Own code for one reason: on sharded matrices torch's form iterates on shards, so that two ranks take another step than
one (6% apart) and every product of the iteration is a collective. Here a matrix is gathered once.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hybridrl.training.shards import local, own_shard, whole

# Coefficients of the quintic iteration, from the author's description: steepest at zero, not exact at one.
A, B, C = 3.4445, -4.7750, 2.0315
ITERATIONS = 5


class Muon(Optimizer):
    """For matrices, whole or sharded by FSDP2; Nesterov momentum, decoupled weight decay."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"], group["momentum"], group["weight_decay"])

    def _update(self, parameter: nn.Parameter, lr: float, momentum: float, weight_decay: float) -> None:
        state = self.state[parameter]
        average = state.setdefault("momentum_buffer", torch.zeros_like(parameter.grad))
        average.lerp_(parameter.grad, 1 - momentum)
        direction = orthogonalise(whole(parameter.grad.lerp(average, momentum)))
        # A tall matrix's update would otherwise be small beside its entries.
        scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
        local(parameter).mul_(1 - lr * weight_decay).add_(own_shard(direction, parameter), alpha=-lr * scale)


def orthogonalise(matrix: Tensor) -> Tensor:
    """Roughly U V^T of the singular value decomposition [rows, columns], iterated in bfloat16 on CUDA."""
    # A CPU without instructions for it multiplies in bfloat16 at a twentieth of the speed.
    wide = matrix.bfloat16() if matrix.is_cuda else matrix.float()
    tall = wide.shape[0] > wide.shape[1]
    wide = wide.mT if tall else wide
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = wide @ wide.mT
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=B, alpha=C), wide, beta=A)
    return (wide.mT if tall else wide).to(matrix.dtype)

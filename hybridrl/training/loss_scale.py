"""Keeps the gradients of a computation in float16 within its range (Micikevicius et al. 2018).

The loss is multiplied by a factor before the backward pass and the gradient divided by it after: without it small
gradients vanish. Where the gradient overflows, the factor is halved and the pass repeated, so no update is lost.
"""

import torch
from torch import nn

FIRST, GROWTH_INTERVAL = 2.0**16, 200


class LossScale:
    """The factor; 1, and without effect, for every type but float16."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.adapts = dtype == torch.float16
        self.factor = FIRST if self.adapts else 1.0
        self.sound = 0  # updates since the factor last changed

    def undo(self, model: nn.Module) -> None:
        """Divide the gradients by the factor."""
        if self.factor != 1:
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            torch._foreach_mul_(gradients, 1 / self.factor)

    def shrink(self) -> bool:
        """After a gradient that is not finite. Returns whether it is worth another try: at 1 the fault is not this."""
        shrunk = self.factor > 1
        self.factor, self.sound = max(self.factor / 2, 1.0), 0
        return shrunk

    def grow(self) -> None:
        """After a sound update."""
        self.sound += 1
        if self.adapts and self.sound == GROWTH_INTERVAL:
            self.factor, self.sound = self.factor * 2, 0

    def state(self) -> dict[str, float]:
        return {"loss_scale": self.factor, "sound_updates": self.sound} if self.adapts else {}

    def load(self, state: dict[str, float]) -> None:
        self.factor, self.sound = state.get("loss_scale", self.factor), int(state.get("sound_updates", 0))

"""What may be asked of a language model's head about given tokens, and what it says. Computes nothing of it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


# Named tuples: FSDP2 looks for tensors in what a model takes and returns, and not in every torch inside dataclasses.
class TokenOutputs(NamedTuple):
    """What a language model says of each response token, in float32; None where not asked for."""

    log_probs: Tensor  # [response tokens]
    entropies: Tensor | None = None  # [response tokens]
    sum_pi_squared: Tensor | None = None  # [response tokens] of all tokens' squared probabilities; without a gradient
    reference_kl: Tensor | None = None  # [response tokens] KL(policy || reference), exact


class LogitRule(NamedTuple):
    """What a family does to its logits after the head: scales them, and bends them so that none exceeds a cap."""

    scale: float = 1.0
    cap: float | None = None

    def apply_(self, logits: Tensor) -> Tensor:
        if self.scale != 1:
            logits.mul_(self.scale)
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def slopes(self, logits: Tensor) -> Tensor | None:
        """Of the cap, where it made these logits; None: there is no cap, and slopes are 1."""
        return None if self.cap is None else 1 - (logits / self.cap).square_()


class Head(NamedTuple):
    """From hidden states to logits."""

    weight: Tensor  # [vocabulary, width], whole
    bias: Tensor | None = None  # [vocabulary]
    rule: LogitRule = LogitRule()

    def linear(self, hidden: Tensor, room: Tensor) -> Tensor:
        """Before the rule, in the head's type, written into `room` [tokens, vocabulary]; without a gradient."""
        if self.bias is None:
            return torch.mm(hidden, self.weight.t(), out=room)
        return torch.addmm(self.bias, hidden, self.weight.t(), out=room)

    def logits(self, hidden: Tensor, room: Tensor) -> Tensor:
        """In float32, written into `room` [tokens, vocabulary]; without a gradient."""
        if self.weight.dtype == torch.float32:
            self.linear(hidden, room)
        else:
            room.copy_(F.linear(hidden, self.weight, self.bias))
        return self.rule.apply_(room)


class ReferenceOutputs(NamedTuple):
    """From which a reference's logits of the same response tokens are formed."""

    hidden: Tensor  # [response tokens, width]
    head: Head


# From what is said of the tokens so far, with zeros for those to come, to a loss's gradient by it, right so far.
Foresight = Callable[[TokenOutputs], TokenOutputs]


class Asked(NamedTuple):
    """What is wanted beside log-probs, of logits over a temperature, the reference's too."""

    temperature: float = 1.0
    entropies: bool = False
    entropy_gradient: bool = False
    sum_pi_squared: bool = False
    against: ReferenceOutputs | None = None
    foresight: Foresight | None = None

    @property
    def outputs(self) -> tuple[bool, ...]:
        """Which of `TokenOutputs` are wanted."""
        return True, self.entropies, self.sum_pi_squared, self.against is not None

    @property
    def learnt(self) -> tuple[bool, ...]:
        """Which of `TokenOutputs` have a gradient."""
        return True, self.entropies and self.entropy_gradient, False, self.against is not None

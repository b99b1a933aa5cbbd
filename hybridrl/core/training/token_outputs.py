"""Outputs computed from the logits of given tokens, and how: with torch's own operations on float32 tables.

Logits become probabilities, and these the gradient with respect to the logits, in place. For a token y, with p the
softmax of the logits, entropy H, and KL = KL(p || q), the gradients with respect to the logit of a token v are

    log p_y:  1[v = y] - p_v        H:  -p_v (log p_v + H)        KL:  p_v (log p_v - log q_v - KL)
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrl.core.required import required


# Named tuples: FSDP2 searches what a model takes and returns for tensors, but not in every torch inside dataclasses.
class TokenOutputs(NamedTuple):
    """Outputs for each response token, in float32; None where not requested."""

    log_probs: Tensor  # [response tokens]
    entropies: Tensor | None = None  # [response tokens]
    sum_pi_squared: Tensor | None = None  # [response tokens] of all tokens' squared probabilities; without a gradient
    reference_kl: Tensor | None = None  # [response tokens] KL(policy || reference), exact

    def map(self, function: Callable[[Tensor], Tensor]) -> "TokenOutputs":
        """Apply a function to the fields that are not None."""
        return TokenOutputs._make(value if value is None else function(value) for value in self)


class LogitRule(NamedTuple):
    """The transformation that a model family applies to its logits after the head: a scale, then a soft cap."""

    scale: float = 1.0
    cap: float | None = None

    def apply_(self, logits: Tensor) -> Tensor:
        if self.scale != 1:
            logits.mul_(self.scale)
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def slopes(self, logits: Tensor) -> Tensor | None:
        """Return the derivative of the cap at capped logits; None without a cap, where it is 1."""
        return None if self.cap is None else 1 - (logits / self.cap).square_()


class Head(NamedTuple):
    """Maps hidden states to logits."""

    weight: Tensor  # [vocabulary, width], unsharded
    bias: Tensor | None = None  # [vocabulary]
    rule: LogitRule = LogitRule()

    def linear(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Write logits before the rule, in the head's type, into `out` [tokens, vocabulary]; without a gradient."""
        if self.bias is None:
            return torch.mm(hidden, self.weight.t(), out=out)
        return torch.addmm(self.bias, hidden, self.weight.t(), out=out)

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Write float32 logits into `out` [tokens, vocabulary]; without a gradient."""
        if self.weight.dtype == torch.float32:
            self.linear(hidden, out)
        else:
            out.copy_(F.linear(hidden, self.weight, self.bias))
        return self.rule.apply_(out)


class ReferenceOutputs(NamedTuple):
    """The hidden states and head that give the reference's logits for the same response tokens."""

    hidden: Tensor  # [response tokens, width]
    head: Head


# Maps the outputs computed so far, with zeros for the remaining tokens, to the gradient of a loss with respect to them,
# which must already be correct for the tokens so far.
LossGradient = Callable[[TokenOutputs], TokenOutputs]


class OutputSpec(NamedTuple):
    """The outputs to compute in addition to log-probs. All logits are divided by the temperature."""

    temperature: float = 1.0
    entropies: bool = False
    entropy_gradient: bool = False
    sum_pi_squared: bool = False
    against: ReferenceOutputs | None = None
    loss_gradient: LossGradient | None = None

    @property
    def outputs(self) -> tuple[bool, ...]:
        """Return which fields of `TokenOutputs` are requested."""
        return True, self.entropies, self.sum_pi_squared, self.against is not None

    @property
    def differentiable(self) -> tuple[bool, ...]:
        """Return which fields of `TokenOutputs` have a gradient."""
        return True, self.entropies and self.entropy_gradient, False, self.against is not None


class LogitTables:
    """The memory for one chunk after another, at most `tokens` each, and what is computed in it. The tables [tokens,
    vocabulary] are allocated once for all chunks: on CPU fresh memory costs time. On CUDA `logit_kernels.LogitKernels`
    has the same methods."""

    def __init__(self, head: Head, spec: OutputSpec, tokens: int) -> None:
        self.head, self.spec = head, spec
        tables = 1 + spec.entropies + (spec.against is not None)
        shape = (tables, tokens, len(head.weight))
        self.tables = list(head.weight.new_empty(shape, dtype=torch.float32))

    def fill(self, hidden: Tensor, targets: Tensor, against: Tensor | None, *, keep: bool) -> TokenOutputs:
        """Return the outputs of a chunk's hidden states [tokens, width], the reference's too, and targets [tokens].
        With `keep`, what `gradient` needs is kept until the next chunk."""
        self.targets, spec = targets[:, None], self.spec
        # Where nothing else needs the logits, the probabilities overwrite them.
        others = others_normaliser = gaps = None
        first, second, last = (self.tables[index][: len(targets)] for index in (0, int(spec.entropies), -1))
        if against is not None:
            others = self._below_largest(required(spec.against).head.logits(against, last))
            others_normaliser = torch.exp(others, out=first).sum(-1, keepdim=True).log()
        logits = self.head.logits(hidden, first)
        self.slopes = self.head.rule.slopes(logits) if keep else None
        own = self._below_largest(logits).gather(-1, self.targets)
        if against is not None:
            gaps = torch.sub(logits, required(others), out=last)
        probabilities = torch.exp(logits, out=second)
        sums = probabilities.sum(-1, keepdim=True)
        self.normaliser = sums.log()  # of logits less each token's largest
        log_probs = (own - self.normaliser).squeeze(-1)
        if not keep and not any(spec.outputs[1:]):
            return TokenOutputs(log_probs)
        self.probabilities = probabilities.div_(sums)
        entropies = squares = kl = None
        if spec.entropies:  # logits and gaps are multiplied by the probabilities in place
            self.logits = logits.mul_(probabilities)
            entropies = self.normaliser.squeeze(-1) - self.logits.sum(-1)
        if spec.sum_pi_squared:
            squares = torch.linalg.vector_norm(probabilities, dim=-1).square()
        if against is not None:
            self.gaps = required(gaps).add_(required(others_normaliser) - self.normaliser).mul_(probabilities)
            kl = self.gaps.sum(-1)
        self.outputs = TokenOutputs(log_probs, entropies, squares, kl)
        return self.outputs

    def _below_largest(self, logits: Tensor) -> Tensor:
        """Divide by the temperature and subtract each token's largest logit, in place."""
        if self.spec.temperature != 1:
            logits.div_(self.spec.temperature)
        return logits.sub_(logits.amax(-1, keepdim=True))

    def gradient(self, by: TokenOutputs) -> Tensor:
        """Return the gradient with respect to a chunk's logits [tokens, vocabulary], in the head's type, given that
        with respect to its outputs; can be called once."""
        _, entropies, _, kl = self.spec.differentiable
        outputs, by = (of.map(lambda value: value[:, None]) for of in (self.outputs, by))
        factor = -by.log_probs
        if entropies:
            factor = factor + required(by.entropies) * (self.normaliser - required(outputs.entropies))
        if kl:
            factor = factor - required(by.reference_kl) * required(outputs.reference_kl)
        table = self.probabilities.mul_(factor)
        if entropies:
            table.addcmul_(self.logits, required(by.entropies), value=-1)
        if kl:
            table.addcmul_(self.gaps, required(by.reference_kl))
        table.scatter_add_(-1, self.targets, by.log_probs)
        if self.slopes is not None:
            table.mul_(self.slopes)
        scale = self.head.rule.scale / self.spec.temperature
        return (table if scale == 1 else table.mul_(scale)).to(self.head.weight.dtype)

"""A chunk's outputs and their gradient by the logits, with torch's own operations on float32 tables.

Logits become probabilities, and these the gradient by the logits, where they lie. Of a token y, with p the softmax of
the logits, the entropy H, and KL = KL(p || q), the gradients by the logit of a token v are

    log p_y:  1[v = y] - p_v        H:  -p_v (log p_v + H)        KL:  p_v (log p_v - log q_v - KL)
"""

import torch
from torch import Tensor

from hybridrl.training.token_outputs import Asked, Head, TokenOutputs


class LogitTables:
    """Tables [tokens, vocabulary] are made once for all chunks: on CPU fresh memory costs time."""

    def __init__(self, head: Head, asked: Asked, tokens: int) -> None:
        self.head, self.asked = head, asked
        tables = 1 + asked.entropies + (asked.against is not None)
        shape = (tables, tokens, len(head.weight))
        self.tables = list(head.weight.new_empty(shape, dtype=torch.float32))

    def fill(self, hidden: Tensor, targets: Tensor, against: Tensor | None, *, learning: bool) -> TokenOutputs:
        self.targets, asked = targets[:, None], self.asked
        # Where nothing else needs the logits, the probabilities take their place.
        first, second, last = (self.tables[place][: len(targets)] for place in (0, int(asked.entropies), -1))
        if against is not None:
            others = self._below_largest(asked.against.head.logits(against, last))
            others_normaliser = torch.exp(others, out=first).sum(-1, keepdim=True).log()
        logits = self.head.logits(hidden, first)
        self.slopes = self.head.rule.slopes(logits) if learning else None
        own = self._below_largest(logits).gather(-1, self.targets)
        if against is not None:
            gaps = torch.sub(logits, others, out=last)
        probabilities = torch.exp(logits, out=second)
        sums = probabilities.sum(-1, keepdim=True)
        self.normaliser = sums.log()  # of logits less each token's largest
        log_probs = (own - self.normaliser).squeeze(-1)
        if not learning and not any(asked.outputs[1:]):
            return TokenOutputs(log_probs)
        self.probabilities = probabilities.div_(sums)
        self.logits = logits if asked.entropies else None
        self.gaps = gaps.add_(others_normaliser - self.normaliser) if against is not None else None
        self.outputs = TokenOutputs(log_probs, *self._sums())
        return self.outputs

    def _below_largest(self, logits: Tensor) -> Tensor:
        """Over the temperature, less each token's largest; in place."""
        if self.asked.temperature != 1:
            logits.div_(self.asked.temperature)
        return logits.sub_(logits.amax(-1, keepdim=True))

    def _sums(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Entropies, sums of squares and KL; in place logits and gaps are weighted with the probabilities."""
        probabilities, entropies, squares, kl = self.probabilities, None, None, None
        if self.logits is not None:
            entropies = self.normaliser.squeeze(-1) - self.logits.mul_(probabilities).sum(-1)
        if self.asked.sum_pi_squared:
            squares = torch.linalg.vector_norm(probabilities, dim=-1).square()
        if self.gaps is not None:
            kl = self.gaps.mul_(probabilities).sum(-1)
        return entropies, squares, kl

    def gradient(self, by: TokenOutputs) -> Tensor:
        _, entropies, _, kl = self.asked.learnt
        outputs, by = (TokenOutputs(*(v if v is None else v[:, None] for v in of)) for of in (self.outputs, by))
        factor = -by.log_probs
        if entropies:
            factor = factor + by.entropies * (self.normaliser - outputs.entropies)
        if kl:
            factor = factor - by.reference_kl * outputs.reference_kl
        table = self.probabilities.mul_(factor)
        if entropies:
            table.addcmul_(self.logits, by.entropies, value=-1)
        if kl:
            table.addcmul_(self.gaps, by.reference_kl)
        table.scatter_add_(-1, self.targets, by.log_probs)
        if self.slopes is not None:
            table.mul_(self.slopes)
        scale = self.head.rule.scale / self.asked.temperature
        return (table if scale == 1 else table.mul_(scale)).to(self.head.weight.dtype)

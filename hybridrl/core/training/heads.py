"""Heads, and the divergence of the policy from another model over the tokens of both heads, chunk by chunk.

p is the policy's distribution and q the other model's, both normalised over these tokens, and m = b q + (1 - b) p. The
divergences D, and their gradients with respect to the policy's logit of a token v, are

    reverse KL:  sum p (log p - log q)                   p_v (log p_v - log q_v - D)
    forward KL:  sum q (log q - log p)                   p_v - q_v
    JSD:         b KL(q || m) + (1 - b) KL(p || m)       (1 - b) p_v (log p_v - log m_v - KL(p || m))

the JSD being that of Agarwal et al. 2024 (arXiv 2306.13649). A token of probability 0 contributes 0 where it is a
factor; elsewhere it makes a KL infinite.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrl.config.catalog import Divergence


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

    def first(self, rows: int) -> "Head":
        """Return the head of the first `rows` tokens, which shares its memory."""
        return Head(self.weight[:rows], None if self.bias is None else self.bias[:rows], self.rule)


class ReferenceOutputs(NamedTuple):
    """The hidden states and head that give another model's logits for the same response tokens."""

    hidden: Tensor  # [response tokens, width]
    head: Head


class TopTokens(NamedTuple):
    """Another model's most probable tokens, without its head."""

    hidden: Tensor  # [response tokens, k, 2] int32: ids and the bits of log-probs, which FSDP2 would round


TABLES = {"reverse_kl": 1, "forward_kl": 2, "jsd": 3, "forward_kl_topk": 0}  # tables of logits in a chunk
UNREACHED = 1e-4  # what the policy finds less probable, its samples do not reach
MEASURED = 8  # the mass is computed for every eighth token of a chunk, as it needs another pass over a table
LARGEST_SHARE = 1 - 1e-6  # sum of the most probable tokens; the others have the rest


class ComparedTables:
    """One other model in a chunk: its logits, and the policy's divergence from it. A chunk calls the methods in
    their order."""

    def __init__(self, head: Head, divergence: Divergence, rows: int, tokens: int, *, teaches: bool) -> None:
        """Allocate tables for the tokens of both this head and the policy's, which has this number of rows. The
        mass that the policy does not reach is computed for a teacher alone."""
        self.head, (self.kind, self.beta, _) = head.first(rows), divergence
        self.rows = len(self.head.weight)
        self.has_fewer, self.teaches = self.rows < rows, teaches
        shape = TABLES[self.kind], tokens, self.rows
        self.tables = list(head.weight.new_empty(shape, dtype=torch.float32))

    def read(self, hidden: Tensor, temperature: float, scratch: Tensor) -> None:
        """Compute the logits less each token's largest, their normaliser, and q unless a reverse KL needs none."""
        self.gaps, *self.others = (table[: len(hidden)] for table in self.tables)
        logits = below_largest(self.head.logits(hidden, self.gaps), temperature)
        q = torch.exp(logits, out=self.others[0] if self.others else scratch[:, : self.rows])
        total = q.sum(-1, keepdim=True)
        self.normaliser = total.log()
        if self.teaches:
            self.measured = q[::MEASURED] / total[::MEASURED]
        if self.others:
            q.div_(total)

    def subtract_from(self, logits: Tensor) -> None:
        """Turn the logits into the policy's less these."""
        torch.sub(logits[:, : self.rows], self.gaps, out=self.gaps)

    def diverge(self, probabilities: Tensor, normaliser: Tensor) -> Tensor:
        """Return the divergence [tokens], given the policy's probabilities and the normaliser of its logits. Its
        gradient with respect to the logits is then `slopes` less `level` times the probabilities, in common tokens.
        `unreached`: the other model's mass on tokens that the policy's samples do not reach, from some tokens."""
        p = probabilities[:, : self.rows]
        gaps = self.gaps.add_(self.normaliser - normaliser)  # log p - log q
        if self.has_fewer:
            share = p.sum(-1, keepdim=True)
            p = p / share
            gaps.sub_(share.log())
        if self.teaches:
            unreached = (self.measured * (p[::MEASURED] < UNREACHED)).sum(-1)
            self.unreached = unreached.repeat_interleave(MEASURED)[: len(p)]
        match self.kind:
            case "reverse_kl":
                value = self.level = expected(gaps, p)
                self.slopes = gaps
            case "forward_kl":
                value = -expected(gaps, self.others[0])
                self.slopes, self.level = self.others[0].neg_(), -torch.ones_like(value)
            case _:  # jsd
                q, mixed = self.others
                shares = [gaps.new_full((), math.log(share)) for share in (self.beta, 1 - self.beta)]
                torch.logaddexp(torch.add(gaps, shares[1], out=mixed), shares[0], out=mixed)  # log m - log q
                of_q = -expected(mixed, q)
                torch.logaddexp(torch.sub(shares[0], gaps, out=gaps), shares[1], out=gaps)  # log m - log p
                self.slopes = gaps.mul_(self.beta - 1)
                self.level = expected(self.slopes, p)
                value = self.beta * of_q + self.level
        if self.has_fewer:  # the policy's table has probabilities of all its tokens
            self.slopes.addcmul_(p, self.level[:, None], value=-1)
            self.level = None
        return value

    def add_slopes(self, table: Tensor, by: Tensor) -> None:
        """Add the slopes, times the gradient with respect to the divergence [tokens, 1]."""
        table[:, : self.rows].addcmul_(self.slopes, by)


class ComparedTop:
    """The most probable tokens of another model in a chunk, with the methods of ComparedTables."""

    def __init__(self, divergence: Divergence, rows: int) -> None:
        self.least, self.rows = divergence.least, rows

    def read(self, top: Tensor, *_: object) -> None:
        """Take ids and log-probs; tokens that the policy does not have are among the others."""
        ids, self.log_q = top[..., 0].long(), top[..., 1].view(torch.float32)
        self.known, self.ids = ids < self.rows, ids.clamp(max=self.rows - 1)

    def subtract_from(self, logits: Tensor) -> None:
        """Read the policy's logits."""
        self.own = logits.gather(-1, self.ids)

    def diverge(self, _: Tensor, normaliser: Tensor) -> Tensor:
        """Return the divergence [tokens]: sum q (log q - log p) over these tokens and all others together, r. Its
        gradient is p_v - q_v, and p_v (1 - q_r / p_r) for the others."""
        log_p = self.own - normaliser
        p, q = (values.exp() * self.known for values in (log_p, self.log_q))
        self.unreached = (q * (p < UNREACHED)).sum(-1)
        bounded = log_p if self.least is None else log_p.clamp(min=self.least)
        rest_p, rest_q = (1 - share.sum(-1).clamp(max=LARGEST_SHARE) for share in (p, q))
        counted = torch.where(bounded == log_p, q, 0.0)
        ratio = rest_q / rest_p
        self.level, self.slopes = ratio - counted.sum(-1) - rest_q, p * ratio[:, None] - counted
        gaps = torch.where(q > 0, self.log_q - bounded, 0.0)
        return (q * gaps).sum(-1) + rest_q * ratio.log()

    def add_slopes(self, table: Tensor, by: Tensor) -> None:
        table.scatter_add_(-1, self.ids, self.slopes * by)


def below_largest(logits: Tensor, temperature: float) -> Tensor:
    """Divide by the temperature and subtract each token's largest logit, in place."""
    if temperature != 1:
        logits.div_(temperature)
    return logits.sub_(logits.amax(-1, keepdim=True))


def expected(values: Tensor, probabilities: Tensor) -> Tensor:
    """Multiply values [tokens, vocabulary] by probabilities in place and return each token's sum. A
    probability of 0 contributes 0 even where the value is infinite."""
    sums = values.mul_(probabilities).sum(-1)
    # One more pass over the table. On a CPU it is rare; elsewhere the host would wait to read whether it is needed.
    if not sums.is_cpu or sums.isnan().any():
        sums = values.masked_fill_(probabilities == 0, 0).sum(-1)
    return sums

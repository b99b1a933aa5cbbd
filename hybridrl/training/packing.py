"""Rows -> ranks -> passes: who computes what, decided on the driver from lengths alone, and rows laid out for a model.

The driver plans everything, so that every rank makes the same number of passes (collectives need it) and the divisors
of the loss are known before the first one.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hybridrl.batch import Batch, spans


@dataclass(frozen=True)
class Budget:
    """What one forward and backward pass may hold. A longer single row goes alone."""

    tokens: int
    rows: int | None = None  # a fixed number of rows instead of a number of tokens
    padded: bool = False  # rows are padded to the longest of the pass
    devices: int = 1  # that make a pass together, each a slice of its tokens (sequence_parallel.py)


Passes = list[list[int]]  # one rank's passes: rows of the batch each; an empty one keeps step with the other ranks


def plan(lengths: Sequence[int], ranks: int, budget: Budget, rows: Sequence[int] | None = None) -> list[Passes]:
    """The passes of each rank over the rows named (all, if none are): work balanced, equally many on every rank."""
    rows = range(len(lengths)) if rows is None else rows
    shares = [_passes(share, lengths, budget) for share in balance(rows, lengths, ranks // budget.devices)]
    most = max(len(share) for share in shares)
    return [share + [[]] * (most - len(share)) for share in shares for _ in range(budget.devices)]


def balance(rows: Sequence[int], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Rows dealt to ranks, longest first, each to the rank with the least work so far."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(row)
        heapq.heappush(loads, (load + lengths[row], rank))
    return shares


def _passes(rows: list[int], lengths: Sequence[int], budget: Budget) -> Passes:
    """One rank's rows, longest first, cut into passes within the budget."""
    if budget.rows is not None:
        return [rows[start : start + budget.rows] for start in range(0, len(rows), budget.rows)]
    passes: Passes = []
    used = budget.tokens + 1
    for row in rows:
        # Rows come longest first, so the first row of a pass is as long as any after it.
        cost = lengths[passes[-1][0]] if budget.padded and passes else lengths[row]
        if used + cost > budget.tokens:
            passes.append([])
            used, cost = 0, lengths[row]
        passes[-1].append(row)
        used += cost
    return passes


@dataclass(frozen=True)
class SharedLine:
    """A line that the ranks of a group hold in slices: of its response tokens this rank's begin at `start`."""

    group: ProcessGroup
    start: int
    total: int


@dataclass
class ModelInputs:
    """Rows as a model wants them: end to end in one line of T tokens, or padded on the right to [B, T].

    `predictors` are the places, in the flattened input, whose output predicts the response tokens, in row order.
    """

    input_ids: Tensor  # [1, T] or [B, T]
    position_ids: Tensor  # the same shape
    predictors: Tensor  # [response tokens]
    targets: Tensor  # [response tokens]
    boundaries: Tensor | None  # [B + 1] int32, where rows begin and end in one line; None: a rectangle
    longest: int
    shared: SharedLine | None = None  # the tokens are a slice; boundaries and longest are those of the whole line

    def to(self, device: torch.device) -> "ModelInputs":
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return ModelInputs(**{**vars(self), **moved})


def lay_out(batch: Batch, padded: bool) -> ModelInputs:
    """The rows of a batch, prompt and response of each end to end, as model inputs."""
    lengths = batch.lengths
    longest = int(lengths.max())
    rows = torch.arange(len(batch))
    starts = rows * longest if padded else lengths.cumsum(0) - lengths
    size = len(batch) * longest if padded else int(lengths.sum())
    ids = torch.zeros(size, dtype=torch.int64)
    ids[_places(starts, batch.prompt_lengths)] = batch.prompt_ids.long()
    responses = _places(starts + batch.prompt_lengths, batch.response_lengths)
    ids[responses] = targets = batch.response_ids.long()
    if padded:
        positions = torch.arange(longest).repeat(len(batch))
        boundaries = None
    else:
        positions = torch.arange(size) - torch.repeat_interleave(starts, lengths)
        boundaries = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    shape = (len(batch), longest) if padded else (1, size)
    return ModelInputs(ids.view(shape), positions.view(shape), responses - 1, targets, boundaries, longest)


def _places(starts: Tensor, lengths: Tensor) -> Tensor:
    """Indices starts[i], starts[i] + 1, ... lengths[i] of them, for all rows end to end."""
    packed = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) + torch.repeat_interleave(starts - packed, lengths)


def reassemble(parts: Sequence[Tensor], rows: Sequence[Sequence[int]], lengths: Tensor) -> Tensor:
    """Response-axis values computed for these rows in parts, back in the batch's row order."""
    order = torch.tensor([row for part in rows for row in part], dtype=torch.int64)
    return torch.cat(list(parts))[spans(lengths[order], order.argsort())]

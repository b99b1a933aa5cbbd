"""Rows -> ranks -> passes: who computes what, decided on the driver from lengths alone, and rows laid out for a model.

The driver plans everything, so that every rank makes the same number of passes (collectives need it) and the divisors
of the loss are known before the first one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hybridrl.batch import Batch, pieces, places
from hybridrl.training.balance import deal

UNEVEN = 2e-4  # by so much of the mean a rank may have more work: down to half of it would double the time of a plan


@dataclass(frozen=True)
class Budget:
    """What one forward and backward pass may hold. A longer single row goes alone."""

    tokens: int
    rows: int | None = None  # a fixed number of rows instead of a number of tokens
    padded: bool = False  # rows are padded to the longest of the pass
    devices: int = 1  # that make a pass together, each a slice of its tokens (sequence_parallel.py)


Passes = list[list[int]]  # one rank's passes: rows of the batch each; an empty one keeps step with the other ranks
Lengths = Sequence[int] | np.ndarray  # prompt plus response tokens of each row of the batch


def plan(lengths: Lengths, ranks: int, budget: Budget, rows: Sequence[int] | None = None) -> list[Passes]:
    """The passes of each rank over the rows named (all, if none are): work balanced, equally many on every rank."""
    lengths = np.asarray(lengths, dtype=np.int64)
    shares = balance(np.arange(len(lengths)) if rows is None else rows, lengths, ranks // budget.devices)
    plans = [_passes(share, lengths, budget) for share in shares]
    while min(map(len, plans)) < (most := max(map(len, plans))):
        # Ranks wait for one another in every pass, so a rank that needs fewer spreads its rows over as many.
        plans = [
            own if len(own) == most else _passes(share, lengths, budget, most)
            for own, share in zip(plans, shares, strict=True)
        ]
    return [own for own in plans for _ in range(budget.devices)]


def balance(rows: Sequence[int] | np.ndarray, lengths: Lengths, ranks: int) -> list[list[int]]:
    """Rows dealt to ranks, longest first, each to the rank with the least work so far; then, if a rank has more than
    1 + UNEVEN times the mean, rows are exchanged."""
    rows = np.asarray(rows, dtype=np.int64)
    work = np.asarray(lengths, dtype=np.int64)[rows]
    shares, _ = deal(work, ranks, (1 + UNEVEN) * work.sum() / ranks)
    return [rows[share].tolist() for share in shares]


def _passes(share: list[int], lengths: np.ndarray, budget: Budget, least: int = 0) -> Passes:
    """One rank's rows cut into passes within the budget, no fewer than asked for; some may be empty."""
    rows = np.asarray(share, dtype=np.int64)
    rows = rows[np.argsort(-lengths[rows], kind="stable")]
    if budget.rows is not None:
        passes = [rows[start : start + budget.rows].tolist() for start in range(0, len(rows), budget.rows)]
    elif budget.padded:
        passes = _rectangles(rows.tolist(), lengths, budget.tokens)
    else:
        alone = int((lengths[rows] > budget.tokens).sum())
        passes = [[row] for row in rows[:alone].tolist()]
        passes += _even(rows[alone:], lengths, budget.tokens, least - alone)
    return passes + [[]] * (least - len(passes))


def _rectangles(rows: list[int], lengths: np.ndarray, tokens: int) -> Passes:
    """Rows, longest first, cut into passes of at most so many tokens when padded to the longest of the pass."""
    passes: Passes = []
    for row in rows:
        if not passes or lengths[passes[-1][0]] * (len(passes[-1]) + 1) > tokens:
            passes.append([])
        passes[-1].append(row)
    return passes


def _even(rows: np.ndarray, lengths: np.ndarray, tokens: int, least: int) -> Passes:
    """Rows, longest first and none longer than `tokens`, in as few passes of at most so many tokens as are found to do,
    but no fewer than `least`; the passes are nearly alike."""
    if not len(rows):
        return []
    work = lengths[rows]
    # Neither their sum fits into fewer, nor the longest of them: `tokens // length` rows as long as that in a pass.
    fewest = np.append(-(-work.sum() // tokens), -(-np.arange(1, len(work) + 1) // (tokens // work)))
    count = max(int(fewest.max()), least)
    while True:
        shares, largest = deal(work, count, tokens)
        if largest <= tokens:
            return [rows[share].tolist() for share in shares]
        count += max(1, count // 50)


def parts(batch: Batch, passes: Passes) -> Iterator[Batch]:
    """The rows of each pass; a pass without rows is made with one, to keep step with the other ranks."""
    return (batch.select(rows or [0]) for rows in passes)


@dataclass(frozen=True)
class Line:
    """Rows that lie end to end, as attention has to know them. The lengths are numbers of the host: to read them from
    a GPU would let the host wait for it in every layer."""

    lengths: tuple[int, ...]
    boundaries: Tensor  # [rows + 1] int32, where rows begin and end
    group: ProcessGroup | None = None  # whose ranks hold the line in slices

    @classmethod
    def of(cls, lengths: Sequence[int], group: ProcessGroup | None = None) -> "Line":
        return cls(tuple(lengths), torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), group)

    def to(self, device: torch.device) -> "Line":
        return replace(self, boundaries=self.boundaries.to(device))


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
    line: Line | None  # None: a rectangle
    shared: SharedLine | None = None  # the tokens are a slice of the line

    def to(self, device: torch.device) -> "ModelInputs":
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor | Line)}
        return ModelInputs(**{**vars(self), **moved})


def lay_out(batch: Batch, padded: bool) -> ModelInputs:
    """The rows of a batch, prompt and response of each end to end, as model inputs."""
    lengths = batch.lengths
    longest = int(lengths.max())
    rows = torch.arange(len(batch))
    starts = rows * longest if padded else lengths.cumsum(0) - lengths
    size = len(batch) * longest if padded else int(lengths.sum())
    ids = torch.zeros(size, dtype=torch.int64)
    ids[places(starts, batch.prompt_lengths)] = batch.prompt_ids.long()
    responses = places(starts + batch.prompt_lengths, batch.response_lengths)
    ids[responses] = targets = batch.response_ids.long()
    if padded:
        positions, line = torch.arange(longest).repeat(len(batch)), None
    else:
        positions, line = places(torch.zeros_like(lengths), lengths), Line.of(lengths.tolist())
    shape = (len(batch), longest) if padded else (1, size)
    return ModelInputs(ids.view(shape), positions.view(shape), responses - 1, targets, line)


def reassemble(parts: Sequence[np.ndarray], rows: Sequence[Sequence[int]], lengths: Tensor) -> Tensor:
    """Response-axis values computed for these rows in parts, back in the batch's row order."""
    cut = [
        part[piece]
        for part, own in zip(parts, rows, strict=True)
        for piece in pieces(lengths.numpy()[own], np.arange(len(own)))
    ]
    return torch.from_numpy(np.concatenate([cut[place] for place in np.concatenate(rows).argsort().tolist()]))

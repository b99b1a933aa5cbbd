"""Assign rows to ranks and micro-batches, on the driver and from lengths alone, and lay rows out as model inputs.

The driver plans everything, so that every rank runs the same number of micro-batches (collectives need it) and the
divisors of the loss are known before the first one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from heapq import heapreplace
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hybridrl.core.batch import OWN_ROUTE, Batch, pieces, places

UNEVEN = 2e-4  # how much more work than the mean a rank may have; half of it would double the time of planning


@dataclass(frozen=True)
class MicroBatchBudget:
    """Limits of one micro-batch. A single row that exceeds them gets its own micro-batch."""

    tokens: int
    rows: int | None = None  # a fixed number of rows instead of a number of tokens
    padded: bool = False  # rows are padded to the longest of the micro-batch
    devices: int = 1  # that compute a micro-batch together, each a slice of its tokens (attention.py)
    tensor: int = 1  # of these, how many compute the same slice, each a part of every layer (layout.py)


MicroBatches = list[list[int]]  # one rank's micro-batches, as rows of the batch; an empty one keeps collectives aligned
Lengths = Sequence[int] | np.ndarray  # prompt plus response tokens of each row of the batch


def plan(
    lengths: Lengths, ranks: int, budget: MicroBatchBudget, rows: Sequence[int] | None = None
) -> list[MicroBatches]:
    """Return each rank's micro-batches over these rows (default: all): balanced work, the same number on every rank."""
    lengths = np.asarray(lengths, dtype=np.int64)
    shares = balance(np.arange(len(lengths)) if rows is None else rows, lengths, ranks // budget.devices)
    plans = [_micro_batches(share, lengths, budget) for share in shares]
    while min(map(len, plans)) < (most := max(map(len, plans))):
        # Ranks wait for each other in every micro-batch, so a rank that needs fewer spreads its rows over as many.
        plans = [
            planned if len(planned) == most else _micro_batches(share, lengths, budget, most)
            for planned, share in zip(plans, shares, strict=True)
        ]
    return [planned for planned in plans for _ in range(budget.devices)]


def balance(rows: Sequence[int] | np.ndarray, lengths: Lengths, ranks: int) -> list[list[int]]:
    """Assign rows to ranks, longest first, each to the rank with the least work so far. If a rank then has more than
    1 + UNEVEN times the mean, rows are exchanged."""
    rows = np.asarray(rows, dtype=np.int64)
    work = np.asarray(lengths, dtype=np.int64)[rows]
    shares, _ = partition(work, ranks, (1 + UNEVEN) * work.sum() / ranks)
    return [rows[share].tolist() for share in shares]


def _micro_batches(share: list[int], lengths: np.ndarray, budget: MicroBatchBudget, least: int = 0) -> MicroBatches:
    """Cut one rank's rows into at least `least` micro-batches within the budget; some may be empty."""
    rows = np.asarray(share, dtype=np.int64)
    rows = rows[np.argsort(-lengths[rows], kind="stable")]
    if budget.rows is not None:
        cut = [rows[start : start + budget.rows].tolist() for start in range(0, len(rows), budget.rows)]
    elif budget.padded:
        cut = []
        for row in rows.tolist():
            if not cut or lengths[cut[-1][0]] * (len(cut[-1]) + 1) > budget.tokens:  # padded to the first, the longest
                cut.append([])
            cut[-1].append(row)
    else:
        alone = int((lengths[rows] > budget.tokens).sum())
        cut = [[row] for row in rows[:alone].tolist()]
        cut += _even(rows[alone:], lengths, budget.tokens, least - alone)
    return cut + [[]] * (least - len(cut))


def _even(rows: np.ndarray, lengths: np.ndarray, tokens: int, least: int) -> MicroBatches:
    """Cut rows, longest first and none above `tokens`, into few and nearly equal micro-batches, at least `least`."""
    if not len(rows):
        return []
    work = lengths[rows]
    # Filling micro-batches one after another would leave a small last one. Instead the fewest that can suffice are
    # balanced, and more are tried only while the largest exceeds the budget. Two lower bounds give that number: the
    # sum of all lengths, and for every k the k longest rows, of which at most `tokens // length of the k-th` share one.
    fewest = np.append(-(-work.sum() // tokens), -(-np.arange(1, len(work) + 1) // (tokens // work)))
    count = max(int(fewest.max()), least)
    while True:
        shares, largest = partition(work, count, tokens)
        if largest <= tokens:
            return [rows[share].tolist() for share in shares]
        count += max(1, count // 50)


@dataclass(frozen=True)
class PackedRows:
    """The boundaries of packed rows, for attention. The lengths are kept on the host: reading them from a GPU would
    make the host wait for it in every layer."""

    lengths: tuple[int, ...]
    boundaries: Tensor  # [rows + 1] int32, cumulative lengths
    group: ProcessGroup | None = None  # whose ranks each hold a slice of the tokens

    @classmethod
    def of(cls, lengths: Sequence[int], group: ProcessGroup | None = None) -> "PackedRows":
        return cls(tuple(lengths), torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), group)

    def to(self, device: torch.device) -> "PackedRows":
        return replace(self, boundaries=self.boundaries.to(device))


@dataclass(frozen=True)
class SequenceSlice:
    """This rank's slice of tokens that the ranks of a group share: its response tokens begin at `start` of `total`."""

    group: ProcessGroup
    start: int
    total: int


@dataclass
class ModelInputs:
    """Rows as a model expects them: packed into one sequence of T tokens, or padded on the right to [B, T].
    `predictors` are the indices, into the flattened input, whose output predicts the response tokens, in row order."""

    input_ids: Tensor  # [1, T] or [B, T]
    position_ids: Tensor  # the same shape
    predictors: Tensor  # [response tokens]
    targets: Tensor  # [response tokens]
    packed: PackedRows | None  # None: padded
    routes: Tensor | None = None  # [flattened input, layers, experts of a token] (see Batch.routes)
    slice: SequenceSlice | None = None  # set where the tokens are only a slice of the packed rows

    def to(self, device: torch.device) -> "ModelInputs":
        inputs = vars(self).items()
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in inputs if isinstance(value, Tensor | PackedRows)
        }
        return replace(self, **moved)


def lay_out(batch: Batch, padded: bool) -> ModelInputs:
    """Return the rows of a batch, prompt and response concatenated, as model inputs."""
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
        positions, packed = torch.arange(longest).repeat(len(batch)), None
    else:
        positions, packed = places(torch.zeros_like(lengths), lengths), PackedRows.of(lengths.tolist())
    shape, routes = (len(batch), longest) if padded else (1, size), batch.routes
    if padded and routes is not None:
        routes = routes.new_full((size, *routes.shape[1:]), OWN_ROUTE).index_copy_(0, places(starts, lengths), routes)
    return ModelInputs(ids.view(shape), positions.view(shape), responses - 1, targets, packed, routes)


def reassemble(parts: Sequence[np.ndarray], rows: Sequence[Sequence[int]], lengths: Tensor) -> Tensor:
    """Return response-axis values, computed in parts for these rows, in the batch's row order."""
    cut = [
        part[piece]
        for part, of_part in zip(parts, rows, strict=True)
        for piece in pieces(lengths.numpy()[of_part], np.arange(len(of_part)))
    ]
    return torch.from_numpy(np.concatenate([cut[place] for place in np.concatenate(rows).argsort().tolist()]))


def separate_rows(model: nn.Module) -> None:
    """Make layers that mix neighbouring tokens without attention compute packed rows one by one.

    Convolutions and recurrences would otherwise carry state from one row to the next; attention and all other layers
    still compute packed rows. The layers are recognised by a convolution among their children, which nearly all such
    families have; `model.packed_rows_interact` detects the others.
    """
    for module in model.modules():
        if any(isinstance(child, nn.Conv1d) for child in module.children()):
            module.forward = partial(_row_by_row, module.forward)


def _row_by_row(
    forward: Callable[..., Tensor],
    hidden_states: Tensor,  # [1, T, width] packed, or [B, T, width]
    *arguments: object,
    packed: PackedRows | None = None,
    **options: object,
) -> Tensor:
    sliced = packed is not None and packed.group is not None  # a slice does not consist of rows
    if packed is None or sliced or any(isinstance(value, Tensor) for value in arguments):
        return forward(hidden_states, *arguments, **options)
    rows = hidden_states.split(packed.lengths, dim=1)
    return torch.cat([forward(row, *arguments, **options) for row in rows], dim=1)


# -- balance -----------------------------------------------------------------------------------------------------------
#
# Partition integers into parts of nearly equal sums. Knows nothing of rows, ranks or micro-batches.

MANY = 16  # from this number of parts, rounds over all parts are faster than a loop over the numbers
PARTNERS = 4  # how many of the emptiest parts the fullest one tries to exchange with before it gives up
NEVER = np.array([np.iinfo(np.int64).max])
FEW = 60  # a part with more numbers than this has enough choices without pairs of numbers


def partition(work: np.ndarray, parts: int, limit: float) -> tuple[list[np.ndarray], int]:
    """Return the indices into `work` of each part, and the largest sum: at most `limit` where exchanges achieve it. The
    numbers are integers above 0. They are assigned largest first, each to the part with the smallest sum so far."""
    most = work.max(initial=0)
    order = np.argsort((most - work).astype(np.min_scalar_type(most)), kind="stable")  # 16 bits sort in linear time
    owner, sums = (_in_rounds if parts >= MANY else _one_by_one)(work[order], parts)
    packed, ends = order[np.argsort(owner, kind="stable")], np.bincount(owner, minlength=parts).cumsum()
    shares = np.split(packed, ends[:-1]) if sums.max() <= limit else _exchanged(work, packed, ends, sums, limit)
    return shares, int(sums.max())


def _one_by_one(work: np.ndarray, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the part of each number, always the one with the smallest sum, and the sums of the parts."""
    owner, sums = [], list(range(parts))  # a heap of sum * parts + part
    for scaled in (work * parts).tolist():
        least = sums[0]
        owner.append(least % parts)
        heapreplace(sums, least + scaled)
    sums.sort(key=lambda value: value % parts)
    return np.array(owner, dtype=np.uint8), np.array(sums) // parts


def _in_rounds(work: np.ndarray, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the same as `_one_by_one`, for numbers in descending order, with array operations."""
    # A part that was served in this round has at least the smallest sum plus the smallest number of the round. All
    # parts with less are served before it comes again, so they are served at once, and the parts are sorted only
    # afterwards. The low bits of each sum hold its part's number: one sort moves both, and equal sums keep their order.
    bits = (parts - 1).bit_length()
    number, scaled = (1 << bits) - 1, work << bits
    owner, start, sums = np.empty_like(work), 0, np.arange(parts)  # per part, sum << bits | number, smallest first
    while start < len(work):
        end = min(start + parts, len(work))
        end = start + min(end - start, sums.searchsorted((sums[0] & ~number) + scaled[end - 1]))
        owner[start:end] = sums[: end - start]
        sums[: end - start] += scaled[start:end]
        sums.sort()
        start = end
    return (owner & number).astype(np.min_scalar_type(parts)), sums[(sums & number).argsort()] >> bits


def _exchanged(
    work: np.ndarray, packed: np.ndarray, ends: np.ndarray, sums: np.ndarray, limit: float
) -> list[np.ndarray]:
    """Return the packed shares after exchanges between the fullest part and one of the emptiest. Changes `sums`."""
    # Every part also holds two zeros, so that a number can move without one in return. Single numbers are exchanged
    # until no exchange helps. Sums are then so close that the difference between two pairs of numbers is more likely
    # to match the remaining gap, of which there are quadratically many. The number of rounds is bounded, as a limit
    # below what any partition reaches would otherwise cost time without end.
    work, nothing = np.append(work, 0), len(work)
    shares = np.split(np.insert(packed, np.repeat(ends, 2), nothing), ends[:-1] + 2 * np.arange(1, len(ends)))
    size = 1
    for _ in range(3 * len(sums)):
        order = sums.argsort(kind="stable")
        if sums[order[-1]] <= limit:
            break
        if not any(_level(work, shares, sums, order[-1], other, size) for other in order[:PARTNERS]):
            if size == 2:
                break
            size = 2
    return [share[share < nothing] for share in shares]


def _level(work: np.ndarray, shares: list[np.ndarray], sums: np.ndarray, full: int, other: int, size: int) -> bool:
    """Exchange `size` numbers of two parts so that their sums come as close as possible, with the fuller part still
    at least as large. Returns whether any exchange brings them closer."""
    if size > 1 and max(len(shares[full]), len(shares[other])) > FEW:
        return False
    half = (sums[full] - sums[other]) // 2
    given, taken = (_choices(len(shares[part]), size) for part in (full, other))
    gives, takes = work[shares[full]][given].sum(axis=1), work[shares[other]][taken].sum(axis=1)
    order = takes.argsort()
    # For each choice of the fuller part, the smallest of the other part's that moves at most half their difference.
    takes = np.concatenate([takes[order], NEVER])
    least = takes.searchsorted(gives - half)
    moved = gives - takes[least]
    best = moved.argmax()
    if moved[best] <= 0:
        return False
    mine, theirs = given[best], taken[order[least[best]]]
    shares[full][mine], shares[other][theirs] = shares[other][theirs], shares[full][mine]
    sums[full] -= moved[best]
    sums[other] += moved[best]
    return True


@cache
def _choices(count: int, size: int) -> np.ndarray:
    """Return all choices of `size` indices below `count` [choices, size]."""
    return np.array(list(combinations(range(count), size)))

"""The assignment of rows to updates, ranks and micro-batches, on the driver and from lengths alone.

The driver plans everything, so that every rank runs the same number of micro-batches (collectives need it) and the
divisors of the loss are known before the first one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Self

import numpy as np
import torch
from torch import Tensor

from hybridrl.config.schema import ActorRolloutRefConfig, CriticConfig, FSDPConfig, ModelConfig
from hybridrl.core.algorithms.objective import Divisors
from hybridrl.core.batch import Batch, pieces
from hybridrl.core.carried import TEACHER
from hybridrl.core.training.packing import shared_beginnings, tree_order
from hybridrl.core.training.partition import partition
from hybridrl.required import required

UNEVEN = 2e-4  # a rank may have this much more work than the mean; half of it would double the time of planning

Outputs = list[Tensor | None]  # a model's outputs for all rows, by kind
MicroBatches = list[list[int]]  # one rank's micro-batches, as rows of the batch; an empty one keeps collectives aligned


@dataclass(frozen=True)
class MicroBatchBudget:
    """Limits of one micro-batch. A single piece that exceeds them gets its own micro-batch."""

    tokens: int
    rows: int | None = None  # a fixed number of rows instead of a number of tokens
    padded: bool = False  # rows are padded to the longest of the micro-batch
    shares: bool = True  # rows that begin alike have these tokens once (packing.py)
    devices: int = 1  # ranks that compute a micro-batch together, each a slice of its tokens (attention.py)
    tensor: int = 1  # ranks among them with the same slice, each with a part of every layer (layout.py)

    @classmethod
    def of(cls, model: ModelConfig, fsdp: FSDPConfig, tokens: int, rows: int | None, by_tokens: bool) -> Self:
        """Return the budget of a configuration: `tokens` per device, or `rows`."""
        slices, tensor = fsdp.ulysses_sequence_parallel_size, fsdp.tensor_parallel_size
        padded = not model.use_remove_padding
        return cls(tokens * slices, None if by_tokens else rows, padded, devices=slices * tensor, tensor=tensor)


def training_seed(*keys: int) -> int:
    """Return a seed for random numbers, derived from the run's seed and, for example, a step and a rank.

    Python hashes a tuple of integers to the same number in every process and, since 3.8, in every version of CPython
    on 64 bits. No document promises this, so a test checks three values: others would change how resumed runs shuffle.
    """
    return hash(keys) & 0x7FFFFFFF


@dataclass(frozen=True)
class UpdatePlan:
    """The division of a step's rows into optimizer updates of one model, and the size of their micro-batches."""

    prompts_per_update: int
    epochs: int
    shuffle: bool
    seed: int
    budget: MicroBatchBudget

    @classmethod
    def of(cls, section: ActorRolloutRefConfig | CriticConfig) -> Self:
        """Return the plan of the policy's updates, or of the critic's."""
        is_critic = isinstance(section, CriticConfig)
        trained, fsdp = (section, section.fsdp) if is_critic else (section.actor, section.actor.fsdp_config)
        rows, by_tokens = trained.ppo_micro_batch_size_per_gpu, trained.use_dynamic_bsz
        return cls(
            prompts_per_update=trained.ppo_mini_batch_size,
            epochs=trained.ppo_epochs,
            shuffle=trained.shuffle,
            seed=trained.data_loader_seed,
            budget=MicroBatchBudget.of(section.model, fsdp, trained.ppo_max_token_len_per_gpu, rows, by_tokens),
        )

    def laid_out(self, padded: bool, shares: bool) -> Self:
        """Return the same plan for a model with this layout of rows."""
        return replace(self, budget=replace(self.budget, padded=padded, shares=shares))

    def updates(self, prompts: int) -> int:
        return -(-prompts // self.prompts_per_update) * self.epochs

    def mini_batches(self, group: Tensor, step: int) -> list[list[int]]:
        """Return the rows of each update: complete groups, in order or shuffled once per epoch."""
        groups = group.unique().tolist()
        members = {number: (group == number).nonzero().flatten().tolist() for number in groups}
        size, updates = self.prompts_per_update, []
        for epoch in range(self.epochs):
            order = groups
            if self.shuffle:
                generator = torch.Generator().manual_seed(training_seed(self.seed, step, epoch))
                order = [groups[i] for i in torch.randperm(len(groups), generator=generator)]
            updates += [order[start : start + size] for start in range(0, len(order), size)]
        return [[row for number in update for row in members[number]] for update in updates]


@dataclass(frozen=True)
class MiniBatch:
    """One rank's share of an optimizer update: its micro-batches, and the divisors of the complete mini-batch."""

    micro_batches: MicroBatches
    totals: Divisors
    teachers: tuple[str, ...] = ()  # the model that teaches the rows of each micro-batch, "" for none; empty: of all


@dataclass(frozen=True)
class Pieces:
    """Rows of a batch in pieces that are never cut: the rows of piece i end at `ends[i]`. Integers above 0 per piece:
    `work` is balanced between ranks, `memory` fills micro-batches up to their budget. With padding, memory is
    the length of the longest row times the rows. Arrays, as creating 8,192 objects would take longer than planning."""

    rows: np.ndarray  # [rows]
    ends: np.ndarray  # [pieces]
    work: np.ndarray  # [pieces]
    memory: np.ndarray  # [pieces]

    @classmethod
    def single(
        cls,
        lengths: np.ndarray | Sequence[int],
        rows: Sequence[int] | None = None,
        size: int = 1,
        *,
        padded: bool = False,
        work: np.ndarray | None = None,
    ) -> "Pieces":
        """Return each of these rows (default: all) as a piece, or each `size` neighbours; its memory is its number of
        tokens, `padded` or not, and so is its work, unless the `work` of each row is another."""
        lengths = np.asarray(lengths, dtype=np.int64)
        planned = np.arange(len(lengths)) if rows is None else np.asarray(rows, dtype=np.int64)
        together = lengths[planned].reshape(-1, size)
        tokens, ends = together.sum(1), np.arange(size, len(planned) + 1, size)
        of_pieces = tokens if work is None else work[planned].reshape(-1, size).sum(1)
        return cls(planned, ends, of_pieces, together.max(1, initial=0) * size if padded else tokens)

    @property
    def sizes(self) -> np.ndarray:
        """Return the number of rows of each piece."""
        return np.diff(self.ends, prepend=0)

    def rows_of(self, numbers: np.ndarray) -> list[int]:
        """Return the rows of these pieces."""
        if len(self.rows) == len(self.ends):
            return self.rows[numbers].tolist()
        parts = [self.rows[: self.ends[number]][-self.sizes[number] :] for number in numbers]
        return np.concatenate(parts).tolist() if parts else []


@dataclass(frozen=True)
class Forest:
    """The beginnings that rows of a batch have in common (packing.py). `order` has the rows of each group in the order
    of their tokens; per row, `shared` is how many tokens the row before it in this order has too, `work` that of the
    row, and `shared_work` that of these tokens."""

    order: np.ndarray  # [rows]
    shared: np.ndarray  # [rows]
    work: np.ndarray  # [rows]
    shared_work: np.ndarray  # [rows]

    @classmethod
    def of(
        cls, readings: Sequence[Batch], size: int = 1, work: Callable[[np.ndarray], np.ndarray] = np.asarray
    ) -> "Forest | None":
        """Return what rows share in each of these readings (see `as_read`), by models with the same micro-batches; None
        if it is nothing. `size` neighbouring rows stay together. `work` returns the work of the first tokens of each
        row, given their numbers [rows]."""
        order = tree_order(readings[0]) if size == 1 else np.arange(len(readings[0]))
        shared = np.minimum.reduce([shared_beginnings(rows, order) for rows in readings])
        return cls(order, shared, work(readings[0].lengths.numpy()), work(shared)) if shared.any() else None

    @cached_property
    def place(self) -> np.ndarray:
        """Return the place of each row in the order."""
        return self.order.argsort()

    def continues(self, rows: np.ndarray) -> np.ndarray:
        """Return whether each of these rows has the row before it in the order before it here, and shares tokens."""
        return (self.shared[rows] > 0) & (np.diff(self.place[rows], prepend=-2) == 1)

    def arranged(self, pieces: Pieces) -> Pieces:
        """Return the same pieces in the order of their first rows."""
        numbers = self.place[pieces.rows[pieces.ends - pieces.sizes]].argsort()
        rows = np.array(pieces.rows_of(numbers), dtype=np.int64)
        return Pieces(rows, pieces.sizes[numbers].cumsum(), pieces.work[numbers], pieces.memory[numbers])

    def joined(self, pieces: Pieces, limit: int) -> Pieces:
        """Return arranged pieces, joined with their neighbours where these begin alike, up to a memory of `limit`. A
        sixteenth of what is shared still counts: each row copies keys and values, and has attention and outputs."""
        continues, first = self.continues(pieces.rows), pieces.ends - pieces.sizes
        saved, saved_work = (
            np.where(continues, each[pieces.rows] * 15 // 16, 0) for each in (self.shared, self.shared_work)
        )
        alone = pieces.memory + saved[first] - np.add.reduceat(saved, first)
        starts, total = [], 0
        for number, (memory, common) in enumerate(zip(alone.tolist(), saved[first].tolist(), strict=True)):
            total += memory - common
            if not common or total > limit:
                starts.append(number)
                total = memory
        heads = first[starts]
        saved[heads] = saved_work[heads] = 0
        memory, work = (np.add.reduceat(each, starts) for each in (pieces.memory, pieces.work))
        memory, work = memory - np.add.reduceat(saved, heads), work - np.add.reduceat(saved_work, heads)
        return Pieces(pieces.rows, np.append(heads[1:], len(pieces.rows)), work, memory)

    def in_order(self, plans: Sequence[MicroBatches]) -> list[MicroBatches]:
        """Return the same micro-batches, the rows of each in the order."""
        place = self.place.tolist()
        return [[sorted(rows, key=place.__getitem__) for rows in planned] for planned in plans]

    def fullest(self, plans: Sequence[MicroBatches]) -> int:
        """Return the most work of a rank, counted from its micro-batches. Their rows are in the order."""
        parts = [rows for planned in plans for rows in planned if rows]
        rows, counts = np.array([*chain(*parts)]), [sum(map(len, planned)) for planned in plans]
        continues = self.continues(rows)
        continues[np.cumsum([0, *map(len, parts[:-1])])] = False
        work = np.append(0, (self.work[rows] - continues * self.shared_work[rows]).cumsum())
        return int(np.diff(work[np.cumsum(counts)], prepend=0).max())


def plan_trees(pieces: Pieces, forest: Forest | None, ranks: int, budget: MicroBatchBudget) -> list[MicroBatches]:
    """Return each rank's micro-batches: rows that begin alike are together, as far as budget and balance allow. No rank
    has more work, and there are no more micro-batches, than with every piece alone."""
    best = plan(pieces, ranks, budget)
    if forest is None or budget.padded:
        return best
    arranged = forest.arranged(pieces)
    shared = arranged.rows[forest.continues(arranged.rows)]
    if not len(shared):
        return best
    groups, fewest, best = ranks // budget.devices, len(best[0]), forest.in_order(best)
    least, whole = forest.fullest(best), pieces.work.sum()
    enough = 1.01 * (whole - forest.shared_work[shared].sum()) / groups
    # Trees are cut by one limit, which is halved: it cuts those above the budget, and those too large for a balance.
    limit = budget.tokens if budget.rows is None else int(pieces.memory.sum())
    while least > enough:
        trees = forest.joined(arranged, limit)
        computed = whole - (whole - trees.work.sum()) * 16 / 15
        if len(trees.ends) == len(pieces.ends) or computed >= groups * least:
            break  # smaller trees compute more
        cut = plan(trees, ranks, budget) if budget.rows is None else _cut_by_rows(trees, pieces.sizes[0], ranks, budget)
        cut = forest.in_order(cut)
        if len(cut[0]) <= fewest and (most := forest.fullest(cut)) < least:
            best, least = cut, most
        limit //= 2
    return best


def _cut_by_rows(trees: Pieces, size: int, ranks: int, budget: MicroBatchBudget) -> list[MicroBatches]:
    """Return each rank's trees, cut where micro-batches have their number of rows; `size` neighbours stay together."""
    shares = balance(trees.work, ranks // budget.devices)
    of_ranks = [np.array(trees.rows_of(np.sort(share)), dtype=np.int64).reshape(-1, size) for share in shares]
    most = -(-max(map(len, of_ranks)) // max(required(budget.rows) // size, 1))
    plans = [[part.flatten().tolist() for part in np.array_split(rows, most)] for rows in of_ranks]
    return [planned for planned in plans for _ in range(budget.devices)]


def plan(pieces: Pieces, ranks: int, budget: MicroBatchBudget) -> list[MicroBatches]:
    """Return each rank's micro-batches: balanced work, the same number on every rank."""
    shares = balance(pieces.work, ranks // budget.devices)
    plans = [_micro_batches(share, pieces, budget) for share in shares]
    while min(map(len, plans)) < (most := max(map(len, plans))):
        # Ranks wait for each other in every micro-batch, so a rank that needs fewer spreads its pieces over `most`.
        plans = [
            planned if len(planned) == most else _micro_batches(share, pieces, budget, most)
            for planned, share in zip(plans, shares, strict=True)
        ]
    as_rows = [list(map(pieces.rows_of, planned)) for planned in plans]
    return [planned for planned in as_rows for _ in range(budget.devices)]


def balance(work: np.ndarray, ranks: int) -> list[np.ndarray]:
    """Assign pieces to ranks by their work, largest first, each to the rank with the least so far. If a rank then has
    more than 1 + UNEVEN times the mean, pieces are exchanged."""
    return partition(work, ranks, (1 + UNEVEN) * work.sum() / ranks)[0]


def _micro_batches(share: np.ndarray, pieces: Pieces, budget: MicroBatchBudget, least: int = 0) -> list[np.ndarray]:
    """Cut one rank's pieces into at least `least` micro-batches within the budget; some may be empty."""
    share = share[np.argsort(-pieces.memory[share], kind="stable")]
    if budget.rows is None and not budget.padded:
        alone = int((pieces.memory[share] > budget.tokens).sum())
        cut = [*share[:alone, None], *_even(share[alone:], pieces.memory, budget.tokens, least - alone)]
    else:
        cut = _filled(share, pieces, budget)
    return cut + [share[:0]] * (least - len(cut))


def _filled(share: np.ndarray, pieces: Pieces, budget: MicroBatchBudget) -> list[np.ndarray]:
    """Cut pieces where the next one would exceed the number of rows, or of tokens when padded to the longest row."""
    sizes = pieces.sizes[share]
    if budget.rows is None:
        longest, most = pieces.memory[share] // sizes, budget.tokens
        share, sizes, longest = (values[np.argsort(-longest, kind="stable")] for values in (share, sizes, longest))
    else:
        longest, most = np.ones_like(sizes), budget.rows
    starts, rows = [0], 0
    for number, size in enumerate(sizes.tolist()):
        rows += size
        if rows > size and longest[starts[-1]] * rows > most:
            starts.append(number)
            rows = size
    return np.split(share, starts[1:]) if len(share) else []


def _even(share: np.ndarray, memory: np.ndarray, tokens: int, least: int) -> list[np.ndarray]:
    """Cut pieces, largest first and none above `tokens`, into few and nearly equal micro-batches, at least `least`."""
    if not len(share):
        return []
    sizes = memory[share]
    # Filling micro-batches one after another would leave a small last one. Instead the fewest that can suffice are
    # balanced, and more are tried only while the largest exceeds the budget. Two lower bounds give that number: the
    # sum of all sizes, and for every k the k largest pieces, of which at most `tokens // size of the k-th` share one.
    fewest = np.append(-(-sizes.sum() // tokens), -(-np.arange(1, len(sizes) + 1) // (tokens // sizes)))
    count = max(int(fewest.max()), least)
    while True:
        parts, largest = partition(sizes, count, tokens)
        if largest <= tokens:
            return [share[part] for part in parts]
        count += max(1, count // 50)


def rank_mini_batches(
    batch: Batch,
    ranks: int,
    mini_batches: Sequence[Sequence[int]],
    budget: MicroBatchBudget,
    masks: Sequence[str] = (),
    teachers: Sequence[str] = (),
    size: int = 1,
    work: np.ndarray | None = None,
    forest: Forest | None = None,
) -> list[list[MiniBatch]]:
    """Return each rank's micro-batches of every mini-batch, with the divisors of the whole mini-batch, for these masks
    of the loss too. With teachers a micro-batch has rows of one, and the n-th of every rank of the same one. `size`
    neighbouring rows are never divided. `work` is that of each row, by default its tokens; `forest` is what all models
    of a micro-batch share."""
    lengths, counted = batch.lengths.numpy(), batch.only("response_mask", "episode", *masks)
    read = np.maximum(lengths, batch.in_context().lengths.numpy())  # by the policy or by the teacher of a row
    totals = [Divisors.of(counted.select(rows), masks) for rows in mini_batches]
    planned: list[list[MiniBatch]] = [[] for _ in range(ranks)]

    def pieces_of(rows: Sequence[int]) -> Pieces:
        pieces = Pieces.single(lengths, rows, size, padded=budget.padded, work=work)
        return replace(pieces, memory=read[rows]) if size == 1 else pieces

    for rows, divisors in zip(mini_batches, totals, strict=True):
        taught = _taught(batch, rows, teachers)
        parts = [(name, plan_trees(pieces_of(theirs), forest, ranks, budget)) for name, theirs in taught]
        names = tuple(name for name, of_ranks in parts for _ in of_ranks[0]) if teachers else ()
        for rank, into in enumerate(planned):
            into.append(MiniBatch([each for _, of_ranks in parts for each in of_ranks[rank]], divisors, names))
    return planned


def _taught(batch: Batch, rows: Sequence[int], teachers: Sequence[str]) -> list[tuple[str, Sequence[int]]]:
    """Return these rows by the model that teaches them: the only one all of them, unless they name theirs."""
    if (numbers := batch.carried.get(TEACHER)) is None or not teachers:
        return [(next(iter(teachers), ""), rows)]
    of_rows = numbers.numpy()[np.asarray(rows)]
    names = {-1: "", **dict(enumerate(teachers))}
    return [(name, np.asarray(rows)[of_rows == number].tolist()) for number, name in names.items() if number in of_rows]


def in_row_order(
    columns: Sequence[Sequence[np.ndarray | None]],
    shares: Sequence[MicroBatches],
    lengths: Tensor,
    budget: MicroBatchBudget,
) -> Outputs:
    """Return all outputs, one tensor per kind, in the batch's row order. A rank may have no rows; ranks that computed
    their micro-batches together have the same outputs."""
    columns = columns[:: budget.devices]
    rows = [[row for micro_batch in share for row in micro_batch] for share in shares[:: budget.devices]]
    computed = [(outputs, of_rank) for outputs, of_rank in zip(columns, rows, strict=True) if of_rank]
    kinds = zip(*(outputs for outputs, _ in computed), strict=True)
    filled = [of_rank for _, of_rank in computed]
    return [None if kind[0] is None else reassemble(kind, filled, lengths) for kind in kinds]


def reassemble(parts: Sequence[np.ndarray], rows: Sequence[Sequence[int]], lengths: Tensor) -> Tensor:
    """Return response-axis values, computed in parts for these rows, in the batch's row order."""
    cut = [
        part[piece]
        for part, of_part in zip(parts, rows, strict=True)
        for piece in pieces(lengths.numpy()[of_part], np.arange(len(of_part)))
    ]
    return torch.from_numpy(np.concatenate([cut[place] for place in np.concatenate(rows).argsort().tolist()]))

"""The assignment of rows to updates, ranks and micro-batches, on the driver and from lengths alone.

The driver plans everything, so that every rank runs the same number of micro-batches (collectives need it) and the
divisors of the loss are known before the first one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from hybridrl.config.schema import ActorRolloutRefConfig, CriticConfig, FSDPConfig, ModelConfig
from hybridrl.core.algorithms.objective import Divisors
from hybridrl.core.batch import Batch, pieces
from hybridrl.core.carried import TEACHER
from hybridrl.core.training.partition import partition

UNEVEN = 2e-4  # a rank may have this much more work than the mean; half of it would double the time of planning

MicroBatches = list[list[int]]  # one rank's micro-batches, as rows of the batch; an empty one keeps collectives aligned


@dataclass(frozen=True)
class MicroBatchBudget:
    """Limits of one micro-batch. A single piece that exceeds them gets its own micro-batch."""

    tokens: int
    rows: int | None = None  # a fixed number of rows instead of a number of tokens
    padded: bool = False  # rows are padded to the longest of the micro-batch
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

    def padded(self) -> Self:
        """Return the same plan with rows padded to the longest of a micro-batch."""
        return replace(self, budget=replace(self.budget, padded=True))

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
) -> list[list[MiniBatch]]:
    """Return each rank's micro-batches of every mini-batch, with the divisors of the whole mini-batch, for these masks
    of the loss too. With teachers a micro-batch has rows of one, and the n-th of every rank of the same one. `size`
    neighbouring rows are never divided. `work` is that of each row, by default its tokens."""
    lengths, counted = batch.lengths.numpy(), batch.only("response_mask", "episode", *masks)
    read = np.maximum(lengths, batch.in_context().lengths.numpy())  # by the policy or by the teacher of a row
    totals = [Divisors.of(counted.select(rows), masks) for rows in mini_batches]
    planned: list[list[MiniBatch]] = [[] for _ in range(ranks)]

    def pieces_of(rows: Sequence[int]) -> Pieces:
        pieces = Pieces.single(lengths, rows, size, padded=budget.padded, work=work)
        return replace(pieces, memory=read[rows]) if size == 1 else pieces

    for rows, divisors in zip(mini_batches, totals, strict=True):
        parts = [(name, plan(pieces_of(taught), ranks, budget)) for name, taught in _taught(batch, rows, teachers)]
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


def work_with_pictures(batch: Batch, placeholder: int, weight: float) -> np.ndarray:
    """Return the work of each row in tokens. The tower takes `weight` times what the language model takes for a token
    of a picture."""
    parts = (batch.prompt_ids, batch.prompt_lengths), (batch.response_ids, batch.response_lengths)
    pictured = sum(_count(ids.numpy() == placeholder, lengths.numpy()) for ids, lengths in parts)
    return batch.lengths.numpy() + np.rint(weight * pictured).astype(np.int64)


def _count(marked: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the number of marked elements of each row, whose elements are concatenated."""
    before, ends = np.append(0, marked.cumsum()), lengths.cumsum()
    return before[ends] - before[ends - lengths]


def reassemble(parts: Sequence[np.ndarray], rows: Sequence[Sequence[int]], lengths: Tensor) -> Tensor:
    """Return response-axis values, computed in parts for these rows, in the batch's row order."""
    cut = [
        part[piece]
        for part, of_part in zip(parts, rows, strict=True)
        for piece in pieces(lengths.numpy()[of_part], np.arange(len(of_part)))
    ]
    return torch.from_numpy(np.concatenate([cut[place] for place in np.concatenate(rows).argsort().tolist()]))

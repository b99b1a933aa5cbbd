"""Partition integers into parts of nearly equal sums. Knows nothing of rows, ranks or micro-batches."""

from functools import cache
from heapq import heapreplace
from itertools import combinations

import numpy as np

MANY = 16  # from this number of parts, rounds over all parts are faster than a loop over the numbers
PARTNERS = 4  # number of emptiest parts that the fullest one tries for an exchange before it gives up
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
    # until no exchange helps. The remaining gap is then small, and exchanges of pairs are more likely to match it, as
    # there are quadratically many pairs. The number of rounds is bounded: a limit that no partition reaches would
    # otherwise cost unlimited time.
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
    offered, taken = (_choices(len(shares[part]), size) for part in (full, other))
    gives, takes = work[shares[full]][offered].sum(axis=1), work[shares[other]][taken].sum(axis=1)
    order = takes.argsort()
    # For each choice from the fuller part: the smallest one from the other that moves at most half the difference.
    takes = np.concatenate([takes[order], NEVER])
    least = takes.searchsorted(gives - half)
    moved = gives - takes[least]
    best = moved.argmax()
    if moved[best] <= 0:
        return False
    mine, theirs = offered[best], taken[order[least[best]]]
    shares[full][mine], shares[other][theirs] = shares[other][theirs], shares[full][mine]
    sums[full] -= moved[best]
    sums[other] += moved[best]
    return True


@cache
def _choices(count: int, size: int) -> np.ndarray:
    """Return all choices of `size` indices below `count` [choices, size]."""
    return np.array(list(combinations(range(count), size)))

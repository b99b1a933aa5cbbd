"""Numbers dealt into parts of nearly equal sums. Knows nothing of rows, ranks or passes."""

from functools import cache
from heapq import heapreplace
from itertools import combinations

import numpy as np

MANY = 16  # from so many parts on, rounds over all of them are faster than a loop over the numbers
PARTNERS = 4  # so many of the emptiest parts the fullest tries to exchange with, before it gives up
NEVER = np.array([np.iinfo(np.int64).max])
FEW = 60  # a part of more numbers than this has enough to choose from without pairs of them


def deal(work: np.ndarray, parts: int, limit: float) -> tuple[list[np.ndarray], int]:
    """Places in `work` of each part's numbers, and the largest sum: at most `limit`, where exchanges lead there.

    The numbers are integers above 0. They go largest first, each to the part with the least so far.
    """
    most = work.max(initial=0)
    order = np.argsort((most - work).astype(np.min_scalar_type(most)), kind="stable")  # 16 bits sort in linear time
    owner, sums = (_in_rounds if parts >= MANY else _one_by_one)(work[order], parts)
    line, ends = order[np.argsort(owner, kind="stable")], np.bincount(owner, minlength=parts).cumsum()
    shares = np.split(line, ends[:-1]) if sums.max() <= limit else _exchanged(work, line, ends, sums, limit)
    return shares, int(sums.max())


def _one_by_one(work: np.ndarray, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """The part of each number, each going where there is least, and the sums of the parts."""
    owner, sums = [], list(range(parts))  # a heap of sum * parts + part
    for scaled in (work * parts).tolist():
        least = sums[0]
        owner.append(least % parts)
        heapreplace(sums, least + scaled)
    sums.sort(key=lambda value: value % parts)
    return np.array(owner, dtype=np.uint8), np.array(sums) // parts


def _in_rounds(work: np.ndarray, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """The same for numbers that come largest first: all parts with less than the emptiest will have after its next
    number are served at once, as each of them comes before any comes again."""
    bits = (parts - 1).bit_length()
    number, scaled = (1 << bits) - 1, work << bits
    owner, start, sums = np.empty_like(work), 0, np.arange(parts)  # of each part its sum << bits | number, least first
    while start < len(work):
        end = min(start + parts, len(work))
        end = start + min(end - start, sums.searchsorted((sums[0] & ~number) + scaled[end - 1]))
        owner[start:end] = sums[: end - start]
        sums[: end - start] += scaled[start:end]
        sums.sort()
        start = end
    return (owner & number).astype(np.min_scalar_type(parts)), sums[(sums & number).argsort()] >> bits


def _exchanged(
    work: np.ndarray, line: np.ndarray, ends: np.ndarray, sums: np.ndarray, limit: float
) -> list[np.ndarray]:
    """The shares, which lie end to end, after exchanges between the fullest part and one of the emptiest. Changes
    `sums`.

    Every part holds two zeros beside its numbers, so that numbers may also move without others in return.
    """
    work, nothing = np.append(work, 0), len(work)
    shares = np.split(np.insert(line, np.repeat(ends, 2), nothing), ends[:-1] + 2 * np.arange(1, len(ends)))
    size = 1
    for _ in range(3 * len(sums)):
        order = sums.argsort(kind="stable")
        if sums[order[-1]] <= limit:
            break
        if not any(_level(work, shares, sums, order[-1], other, size) for other in order[:PARTNERS]):
            if size == 2:
                break
            size = 2  # from here on: where single numbers do no more, the sums are near one another
    return [share[share < nothing] for share in shares]


def _level(work: np.ndarray, shares: list[np.ndarray], sums: np.ndarray, full: int, other: int, size: int) -> bool:
    """Exchange `size` numbers of each of two parts so that their sums come as near as they can, the fuller one still
    having as much. Returns whether any exchange brings them nearer."""
    if size > 1 and max(len(shares[full]), len(shares[other])) > FEW:
        return False
    half = (sums[full] - sums[other]) // 2
    given, taken = (_choices(len(shares[part]), size) for part in (full, other))
    gives, takes = work[shares[full]][given].sum(axis=1), work[shares[other]][taken].sum(axis=1)
    order = takes.argsort()
    # For each choice of the fuller part, the least of the other's that moves no more than half their difference.
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
    """All choices of `size` places among `count` [choices, size]."""
    return np.array(list(combinations(range(count), size)))

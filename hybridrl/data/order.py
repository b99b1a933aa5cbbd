"""The order in which prompts are drawn. Knows numbers only, and has no state to save or restore."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np

from hybridrl.config.error import ConfigError


class Order(Protocol):
    """Which row is drawn at which position, where a position counts all prompts drawn since the run began; an epoch
    has `size` of them. To resume, or to go on with another batch size, the position is enough."""

    @property
    def size(self) -> int: ...

    def rows(self, start: int, count: int) -> list[int]:
        """The rows at `count` positions from `start`; runs over into the next epoch."""


@dataclass(frozen=True)
class PromptOrder:
    """Each row once an epoch. Every epoch has a permutation of its own, a function of (seed, epoch)."""

    size: int
    seed: int
    shuffle: bool

    def row(self, position: int) -> int:
        epoch, place = divmod(position, self.size)
        return int(_permutation(self.size, self.seed, epoch)[place]) if self.shuffle else place

    def rows(self, start: int, count: int) -> list[int]:
        return [self.row(position) for position in range(start, start + count)]


@dataclass(frozen=True)
class WeightedOrder:
    """Each group of rows has its share of every epoch, which is as long as there are rows. A group's rows take turns:
    after any number of epochs none has come more than once more than another. Without `shuffle` the groups come one
    after the other."""

    groups: Sequence[np.ndarray]  # the rows of each group
    weights: Sequence[float]
    seed: int
    shuffle: bool

    @cached_property
    def size(self) -> int:
        return sum(map(len, self.groups))

    @cached_property
    def shares(self) -> np.ndarray:  # [groups], positions of an epoch; the largest remainders are rounded up
        exact = np.array(self.weights) / sum(self.weights) * self.size
        shares = np.floor(exact).astype(int)
        shares[np.argsort(shares - exact, kind="stable")[: self.size - shares.sum()]] += 1
        return shares

    def rows(self, start: int, count: int) -> list[int]:
        return [self._row(position) for position in range(start, start + count)]

    def _row(self, position: int) -> int:
        epoch, place = divmod(position, self.size)
        slot = int(_permutation(self.size, self.seed, epoch)[place]) if self.shuffle else place
        ends = np.cumsum(self.shares)
        group = int(np.searchsorted(ends, slot, side="right"))
        share, rows = int(self.shares[group]), self.groups[group]
        drawn = epoch * share + slot - int(ends[group]) + share  # of this group since the run began
        return int(rows[PromptOrder(len(rows), self.seed + 1 + group, self.shuffle).row(drawn)])


@dataclass(frozen=True)
class EpochOrder:
    """Epochs that a function gives, each as its rows; all have to be as long as the first."""

    epoch: Callable[[int], np.ndarray]

    @cached_property
    def size(self) -> int:
        return len(self.epoch(0))

    def rows(self, start: int, count: int) -> list[int]:
        found = []
        for position in range(start, start + count):
            epoch, place = divmod(position, self.size)
            rows = self.epoch(epoch)
            if len(rows) != self.size:
                raise ConfigError(f"epoch {epoch} has {len(rows)} prompts, the first has {self.size}; give it as many")
            found.append(int(rows[place]))
        return found


@lru_cache(maxsize=16)
def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:  # [size]
    return np.random.default_rng(np.random.SeedSequence([seed, epoch])).permutation(size)

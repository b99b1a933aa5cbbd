"""The order in which prompts are drawn. Knows numbers only, and has no state to save or restore."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class PromptOrder:
    """Which row is drawn at which position, where a position counts all prompts drawn since the run began.

    Every epoch has a permutation of its own, a function of (seed, epoch): to resume, or to go on with another
    batch size, the position is enough.
    """

    size: int
    seed: int
    shuffle: bool

    def row(self, position: int) -> int:
        epoch, place = divmod(position, self.size)
        return int(_permutation(self.size, self.seed, epoch)[place]) if self.shuffle else place

    def rows(self, start: int, count: int) -> list[int]:
        """The rows at `count` positions from `start`; runs over into the next epoch."""
        return [self.row(position) for position in range(start, start + count)]


@lru_cache(maxsize=2)
def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:  # [size]
    return np.random.default_rng(np.random.SeedSequence([seed, epoch])).permutation(size)

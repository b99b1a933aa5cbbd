"""The order in which prompts are drawn: shuffled, weighted, or by a custom sampler. Has no state to save or restore."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np

from hybridrl.config.compose import as_section
from hybridrl.config.custom_code import load_class, where
from hybridrl.config.findings import ConfigError
from hybridrl.config.schema import DataConfig
from hybridrl.data.custom_dataset import construct
from hybridrl.data.prompts import PromptDataset
from hybridrl.data.rows import Rows

KEY = "data.sampler.class_path"
MAX_REPEATS = 100  # of all rows in an epoch; beyond that, a custom sampler is considered endless


class Order(Protocol):
    """Maps positions to rows. A position counts all prompts drawn since the run began; an epoch has `size` of them.
    The position alone is enough to resume, also with another batch size."""

    @property
    def size(self) -> int: ...

    def rows(self, start: int, count: int) -> list[int]:
        """Return the rows at `count` positions from `start`, across epochs."""


@dataclass(frozen=True)
class PromptOrder:
    """Each row once per epoch; the permutation of an epoch is a function of (seed, epoch)."""

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
    """Each group of rows has its share of every epoch; an epoch has as many positions as there are rows.

    The rows of a group take turns: after any number of epochs their counts differ by at most one. Without `shuffle`
    the groups follow one another.
    """

    groups: Sequence[np.ndarray]  # the rows of each group
    weights: Sequence[float]
    seed: int
    shuffle: bool

    @cached_property
    def size(self) -> int:
        return sum(map(len, self.groups))

    @cached_property
    def shares(self) -> np.ndarray:  # [groups], positions per epoch; the largest remainders are rounded up
        exact = np.array(self.weights) / sum(self.weights) * self.size
        shares = np.floor(exact).astype(int)
        shares[np.argsort(shares - exact, kind="stable")[: self.size - shares.sum()]] += 1
        return shares

    def rows(self, start: int, count: int) -> list[int]:
        return [self._row(position) for position in range(start, start + count)]

    def _row(self, position: int) -> int:
        epoch, place = divmod(position, self.size)
        place = int(_permutation(self.size, self.seed, epoch)[place]) if self.shuffle else place
        ends = np.cumsum(self.shares)
        group = int(np.searchsorted(ends, place, side="right"))
        share, rows = int(self.shares[group]), self.groups[group]
        drawn = epoch * share + place - int(ends[group]) + share  # rows of this group drawn since the run began
        return int(rows[PromptOrder(len(rows), self.seed + 1 + group, self.shuffle).row(drawn)])


@dataclass(frozen=True)
class EpochOrder:
    """Epochs given by a function, each as its rows; all must be as long as the first."""

    epoch: Callable[[int], np.ndarray]

    @cached_property
    def size(self) -> int:
        return len(self.epoch(0))

    def rows(self, start: int, count: int) -> list[int]:
        drawn = []
        for position in range(start, start + count):
            epoch, place = divmod(position, self.size)
            rows = self.epoch(epoch)
            if len(rows) != self.size:
                cause = f"epoch {epoch} has {len(rows)} prompts, the first has {self.size}"
                raise ConfigError(cause, fix="make all epochs equally long")
            drawn.append(int(rows[place]))
        return drawn


@lru_cache(maxsize=16)
def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:  # [size]
    return np.random.default_rng(np.random.SeedSequence([seed, epoch])).permutation(size)


@runtime_checkable
class EpochAware(Protocol):
    """torch's convention for samplers that differ from epoch to epoch."""

    def set_epoch(self, epoch: int) -> None: ...


@runtime_checkable
class BatchAware(Protocol):
    """verl's convention for samplers that adapt to the batches of a run."""

    def update(self, batch: Any) -> None: ...


class RowValues(Sequence[dict[str, Any]]):
    """Rows as a custom sampler sees them: each a mapping of its columns."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index].values


def build_order(config: DataConfig, prompts: PromptDataset, custom_keys: dict[str, Any] | None = None) -> Order:
    """Return the order that the configuration sets; `custom_keys` are the user's own keys under `data`, for a custom
    sampler. Raises ConfigError."""
    seed = config.seed or 0
    if config.sampler.class_path:
        return _custom_order(config, prompts, custom_keys or {})
    if config.train_weights:
        groups = [np.flatnonzero(prompts.rows.entries == entry) for entry in range(len(config.train_weights))]
        for entry, group in zip(config.train_files, groups, strict=True):
            if not len(group):
                cause = f"data.train_weights: no prompt of {entry} is left"
                raise ConfigError(cause, fix="leave it out, or raise the limits")
        return WeightedOrder(groups, config.train_weights, seed, config.shuffle)
    return PromptOrder(len(prompts), seed, config.shuffle)


def _custom_order(config: DataConfig, prompts: PromptDataset, custom_keys: dict[str, Any]) -> EpochOrder:
    """The order of a custom sampler. It is constructed again for each epoch and must be deterministic: a resumed run
    draws the same prompts as one that was not interrupted."""
    path, name = str(config.sampler.class_path), str(config.sampler.class_name)
    cause, cls = f"{KEY}={path}: {name}", load_class(path, name, KEY)
    if issubclass(cls, BatchAware):
        raise ConfigError(
            f"{cause} adapts to batches (update), so a resumed run could not draw the same prompts",
            fix="order them by the content of rows, or by epoch (set_epoch)",
        )
    values, section = RowValues(prompts.rows), as_section(asdict(config) | custom_keys)

    def draw(epoch: int) -> np.ndarray:
        sampler = construct(cls, {"data_source": values, "data_config": section}, KEY, path)
        if isinstance(sampler, EpochAware):
            sampler.set_epoch(epoch)
        limit = MAX_REPEATS * len(prompts)
        try:
            numbers = np.array([int(row) for row in islice(sampler, limit + 1)], dtype=np.int64)
        except Exception as error:  # custom code can raise anything
            raise ConfigError(f"{cause}, epoch {epoch} fails: {where(error, path)}") from error
        if len(numbers) > limit:
            raise ConfigError(f"{cause}, epoch {epoch} has no end", fix="stop after the rows of one epoch")
        if not len(numbers) or numbers.min() < 0 or numbers.max() >= len(prompts):
            expected = f"expected one or more row numbers from 0 to {len(prompts) - 1}"
            raise ConfigError(f"{cause}, epoch {epoch}: {expected}")
        return numbers

    if not np.array_equal(draw(0), draw(0)):
        raise ConfigError(
            f"{cause} is not deterministic, so a resumed run could not draw the same prompts",
            fix="derive its random numbers from data_config.seed and set_epoch(epoch)",
        )
    order = EpochOrder(lru_cache(maxsize=2)(draw))
    order.rows(order.size, 1)  # raises if the second epoch has another length
    return order

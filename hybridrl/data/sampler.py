"""From the configuration to the order of prompts: as shuffle and weights say, or by a sampler of the user's own.

A sampler of one's own is asked for each epoch anew, so that a run which goes on draws what an unbroken one would.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import lru_cache
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np

from hybridrl.config.compose import as_section
from hybridrl.config.custom_code import load_class, where
from hybridrl.config.error import ConfigError
from hybridrl.config.schema import DataConfig
from hybridrl.data.custom_dataset import constructed
from hybridrl.data.order import EpochOrder, Order, PromptOrder, WeightedOrder
from hybridrl.data.prompts import PromptDataset
from hybridrl.data.rows import Rows

KEY = "data.sampler.class_path"
MOST_REPEATS = 100  # of all rows in an epoch; beyond, a sampler is taken to have no end


@runtime_checkable
class KnowsEpochs(Protocol):
    """torch's convention of samplers that differ from epoch to epoch."""

    def set_epoch(self, epoch: int) -> None: ...


@runtime_checkable
class LearnsFromBatches(Protocol):
    """verl's convention of samplers that follow how a run goes."""

    def update(self, batch: Any) -> None: ...


class RowValues(Sequence[dict[str, Any]]):
    """Rows as a sampler looks at them: each a mapping of its columns."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index].values


def build_order(config: DataConfig, prompts: PromptDataset, own: dict[str, Any] | None = None) -> Order:
    """`own` are the keys of the user's under `data`. Raises ConfigError."""
    seed = config.seed or 0
    if config.sampler.class_path:
        return own_order(config, prompts, own or {})
    if config.train_weights:
        groups = [np.flatnonzero(prompts.rows.entries == entry) for entry in range(len(config.train_weights))]
        for entry, group in zip(config.train_files, groups, strict=True):
            if not len(group):
                raise ConfigError(
                    f"data.train_weights: no prompt of {entry} is left; leave it out, or raise the limits"
                )
        return WeightedOrder(groups, config.train_weights, seed, config.shuffle)
    return PromptOrder(len(prompts), seed, config.shuffle)


def own_order(config: DataConfig, prompts: PromptDataset, own: dict[str, Any]) -> EpochOrder:
    """Refuses a sampler whose epochs cannot be had again."""
    path, name = str(config.sampler.class_path), str(config.sampler.class_name)
    asked, cls = f"{KEY}={path}", load_class(path, name, KEY)
    if issubclass(cls, LearnsFromBatches):
        raise ConfigError(
            f"{asked}: {name} learns from batches (update), so that a run which goes on could not draw the same "
            "prompts; order them by what the rows say, or by epoch (set_epoch)"
        )
    values, section = RowValues(prompts.rows), as_section(asdict(config) | own)

    def draw(epoch: int) -> np.ndarray:
        sampler = constructed(cls, {"data_source": values, "data_config": section}, KEY, path)
        if isinstance(sampler, KnowsEpochs):
            sampler.set_epoch(epoch)
        return _numbers(sampler, len(prompts), f"{asked}: {name}, epoch {epoch}", path)

    if not np.array_equal(draw(0), draw(0)):
        raise ConfigError(
            f"{asked}: {name} gives another order each time that it is asked, so that a run which goes on could not "
            "draw the same prompts; take its random numbers from data_config.seed and set_epoch(epoch)"
        )
    order = EpochOrder(lru_cache(maxsize=2)(draw))
    order.rows(order.size, 1)  # the second epoch, of the same length
    return order


def _numbers(rows: Iterable[Any], count: int, told: str, path: str) -> np.ndarray:
    try:
        numbers = np.array([int(row) for row in islice(rows, MOST_REPEATS * count + 1)], dtype=np.int64)
    except Exception as error:  # whatever the user's own lines raise
        raise ConfigError(f"{told} fails: {where(error, path)}") from error
    if len(numbers) > MOST_REPEATS * count:
        raise ConfigError(f"{told} has no end; an epoch is what it gives until it stops")
    if not len(numbers) or numbers.min() < 0 or numbers.max() >= count:
        raise ConfigError(f"{told}: expected numbers of rows from 0 to {count - 1}, one or more")
    return numbers

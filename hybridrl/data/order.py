"""The order of prompts: shuffled, weighted, by a custom sampler, or by their rewards; only the last has a state."""

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache, partial
from itertools import groupby, islice
from operator import itemgetter
from typing import Any

import numpy as np

from hybridrl.config.compose import as_section
from hybridrl.config.custom_code import calling, construct, load_class
from hybridrl.config.findings import ConfigError
from hybridrl.config.schema import DataConfig
from hybridrl.data.formats import with_objects
from hybridrl.data.prompts import PromptDataset
from hybridrl.data.rows import Rows

KEY = "data.sampler.class_path"
NOW = "now"
MAX_REPEATS = 100  # per row in an epoch, on average; with more a custom sampler is considered endless


class Order:
    """Maps positions to rows. A position counts all prompts drawn since the run began; an epoch has `size` of them.
    The position alone is enough to resume, also with another batch size.

    `epoch` returns the rows of an epoch; all must be as long as the first.
    """

    def __init__(self, epoch: Callable[[int], np.ndarray]) -> None:
        self._epoch = lru_cache(maxsize=2)(epoch)
        self.rates: dict[str, np.ndarray] = {}  # float32 [rows]: the present ones, and those of current epochs
        self.size = len(self._epoch(0))

    def rows(self, start: int, count: int) -> list[int]:
        """Return the rows at `count` positions from `start`, across epochs."""
        drawn = []
        for position in range(start, start + count):
            epoch, place = divmod(position, self.size)
            rows = self._epoch(epoch)
            if len(rows) != self.size:
                cause = f"epoch {epoch} has {len(rows)} prompts, the first has {self.size}"
                raise ConfigError(cause, fix="make all epochs equally long")
            drawn.append(int(rows[place]))
        return drawn

    def observe(self, rewards: Iterable[tuple[int, float]]) -> dict[str, float]:
        """Take the rewards of a step's responses, each with the position of its prompt; return metrics."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"rates": {name: b64encode(rates).decode() for name, rates in self.rates.items()}} if self.rates else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = state.get("rates", {}).items()
        self.rates |= {name: np.frombuffer(b64decode(text), np.float32) for name, text in saved}


class PromptOrder(Order):
    """Each row once per epoch; the permutation of an epoch is a function of (seed, epoch)."""

    def __init__(self, size: int, seed: int, shuffle: bool) -> None:
        super().__init__(partial(_permutation, size, seed) if shuffle else lambda epoch: np.arange(size))


class WeightedOrder(Order):
    """Each group of rows has its share of every epoch; an epoch has as many positions as there are rows.

    The rows of a group take turns: after any number of epochs their counts differ by at most one. Without `shuffle`
    the groups follow one another.
    """

    def __init__(self, groups: Sequence[np.ndarray], weights: Sequence[float], seed: int, shuffle: bool) -> None:
        size = sum(map(len, groups))
        exact = np.array(weights) / sum(weights) * size
        self.shares = np.floor(exact).astype(int)  # [groups], positions per epoch; the largest remainders go up
        self.shares[np.argsort(self.shares - exact, kind="stable")[: size - self.shares.sum()]] += 1
        orders = [PromptOrder(len(rows), seed + 1 + number, shuffle) for number, rows in enumerate(groups)]

        def epoch(number: int) -> np.ndarray:
            parts = zip(groups, orders, self.shares.tolist(), strict=True)
            drawn = np.concatenate([rows[order.rows(number * share, share)] for rows, order, share in parts])
            return drawn[_permutation(size, seed, number)] if shuffle else drawn

        super().__init__(epoch)


class Curriculum(Order):
    """An order by the rates of rows: the mean reward of the last responses to each, clipped to 0..1. Those of an epoch
    are the rates after the last step before the one that samples its first prompt.

    `easy_first`: ten classes, from high rates to low ones. `medium`: m has the weight 4 m (1 - m) + 0.05; in an epoch a
    row occurs as often as its share of the sum, rounded up or down by systematic resampling.
    """

    def __init__(self, kind: str, size: int, seed: int, shuffle: bool) -> None:
        self.unseen = np.full(size, 0.5, np.float32)

        def epoch(number: int) -> np.ndarray:
            rates = self.rates.setdefault(str(number), self.rates.get(NOW, self.unseen)).astype(float)
            order = _permutation(size, seed, number) if shuffle else np.arange(size)
            if kind == "easy_first":
                return order[np.argsort(-np.floor(rates[order] * 10 + 1e-6).clip(max=9), kind="stable")]
            weights = (4 * rates * (1 - rates) + 0.05).cumsum()
            offset = np.random.default_rng(np.random.SeedSequence([seed, number, 1])).random()
            return np.searchsorted(weights, (np.arange(size) + offset) / size * weights[-1])[order]

        super().__init__(epoch)

    def observe(self, rewards: Iterable[tuple[int, float]]) -> dict[str, float]:
        rates, expected, rewards = self.rates.get(NOW, self.unseen).copy(), [], sorted(rewards)
        for position, group in groupby(rewards, itemgetter(0)):
            (row,) = self.rows(position, 1)
            expected.append(float(rates[row]))
            rates[row] = np.clip(np.mean([reward for _, reward in group]), 0, 1)
        current = rewards[-1][0] // self.size
        later = {name: of_epoch for name, of_epoch in self.rates.items() if name != NOW and int(name) >= current}
        self.rates = {NOW: rates} | later
        return {"data/curriculum_rate": sum(expected) / len(expected)}


def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:  # [size]
    return np.random.default_rng(np.random.SeedSequence([seed, epoch])).permutation(size)


class RowValues(Sequence[dict[str, Any]]):
    """Rows for a custom sampler: each is a mapping of its columns."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return with_objects(self._rows[index].values)


def build_order(config: DataConfig, prompts: PromptDataset, custom_keys: dict[str, Any] | None = None) -> Order:
    """Return the order that the configuration sets; `custom_keys` are the user's own keys under `data`, for a custom
    sampler. Raises ConfigError."""
    seed = config.seed or 0
    if config.sampler.class_path:
        return _custom_order(config, prompts, custom_keys or {})
    if config.train_weights:
        entries = np.array([row.entry for row in prompts.rows])
        groups = [np.flatnonzero(entries == entry) for entry in range(len(config.train_weights))]
        for entry, group in zip(config.train_files, groups, strict=True):
            if not len(group):
                cause = f"data.train_weights: no prompt of {entry} is left"
                raise ConfigError(cause, fix="leave it out, or raise the limits")
        return WeightedOrder(groups, config.train_weights, seed, config.shuffle)
    if config.curriculum != "off":
        return Curriculum(config.curriculum, len(prompts), seed, config.shuffle)
    return PromptOrder(len(prompts), seed, config.shuffle)


def _custom_order(config: DataConfig, prompts: PromptDataset, custom_keys: dict[str, Any]) -> Order:
    """The order of a custom sampler. It is constructed again for each epoch and must be deterministic: a resumed run
    draws the same prompts as one that was not interrupted."""
    path, name = str(config.sampler.class_path), str(config.sampler.class_name)
    cause, cls = f"{KEY}={path}: {name}", load_class(path, name, KEY)
    if hasattr(cls, "update"):  # verl's convention for samplers that adapt to the batches of a run
        raise ConfigError(
            f"{cause} adapts to batches (update), so a resumed run could not draw the same prompts",
            fix="order them by the content of rows, or by epoch (set_epoch)",
        )
    values, section = RowValues(prompts.rows), as_section(asdict(config) | custom_keys)

    def draw(epoch: int) -> np.ndarray:
        sampler = construct(cls, {"data_source": values, "data_config": section}, KEY, path)
        if hasattr(sampler, "set_epoch"):  # torch's convention for samplers that differ from epoch to epoch
            sampler.set_epoch(epoch)
        limit = MAX_REPEATS * len(prompts)
        with calling(f"{cause}, epoch {epoch}", path):
            numbers = np.array([int(row) for row in islice(sampler, limit + 1)], dtype=np.int64)
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
    order = Order(draw)
    order.rows(order.size, 1)  # raises if the second epoch has another length
    return order

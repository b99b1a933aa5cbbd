"""The steps of a run for its health rules, and tests of whether a metric has moved or only wanders."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median, stdev, variance

from hybridrl.tracking.sink import is_validation_score

Metrics = Mapping[str, float]
Enough = Callable[[float, float], bool]  # called with a metric's extreme level so far, and its level now

FIRST, WINDOW = 10, 100  # training steps kept from the start of a run, and up to now
SCORE = "critic/score/mean"
LEAST_STEPS, PARTS = 12, 10  # least steps of a recognised change; equal parts of a series for the test of a trend
# Thresholds in multiples of the usual change or noise, and of the standard error. Few random walks of 200 steps move so
# far, and hardly any also passes a rule's own threshold.
JUMP, TREND = 6.0, 10.0
SMOOTHED = 21  # steps for measuring the noise around the course of a metric
NORMAL = 1.4826  # the standard deviation of normal values over their median absolute value


@dataclass(frozen=True)
class Diagnosis:
    """A measured cause, and an override to try."""

    cause: str
    fix: str


@dataclass(frozen=True)
class Validation:
    """Mean score of one validation, and the mean training score of the steps before it."""

    step: int
    score: float
    training: float


@dataclass
class History:
    """The training steps of a run: the first ones, the last ones, an even selection of all, and every validation."""

    first: list[Metrics] = field(default_factory=list)
    recent: deque[Metrics] = field(default_factory=lambda: deque(maxlen=WINDOW))
    selected: list[Metrics] = field(default_factory=list)  # WINDOW to twice as many, in a long enough run
    validations: list[Validation] = field(default_factory=list)
    steps: int = 0
    step: int = 0
    stride: int = 1  # steps between selected ones
    sources: int = 0  # number of data sources with scores in a validation
    moved: set[tuple[str, int]] = field(default_factory=set)  # metrics that rose (1) or fell (-1), and did not return

    def add(self, step: int, metrics: Metrics) -> None:
        self.steps, self.step = self.steps + 1, step
        self.recent.append(metrics)
        if len(self.first) < FIRST:
            self.first.append(metrics)
        if self.steps % self.stride == 0:
            self.selected.append(metrics)
        if len(self.selected) == 2 * WINDOW:
            self.selected, self.stride = self.selected[1::2], 2 * self.stride
        scores = [value for name, value in metrics.items() if is_validation_score(name)]
        self.sources = max(self.sources, len(scores))
        if scores and len(scores) == self.sources:  # without a source (its grader failed) the mean is not comparable
            self.validations.append(Validation(step, fmean(scores), mean_value(self.last(SCORE, 5)) or 0.0))

    def last(self, name: str, count: int) -> list[float]:
        """Return a metric's values in the last `count` steps, fewer if it has fewer."""
        return finite(name, list(self.recent)[-count:])

    def now(self, name: str, count: int = 5) -> float | None:
        """Return a metric's mean over the last `count` steps; None if there are fewer."""
        values = self.last(name, count)
        return fmean(values) if len(values) == count else None

    def start(self, name: str) -> float | None:
        """Return a metric's mean over the first steps."""
        return mean_value(finite(name, self.first))

    def sustained(self, name: str, count: int, least: float) -> float | None:
        """Return a metric's value now if it was at least `least` in each of the last `count` steps."""
        values = self.last(name, count)
        return values[-1] if len(values) == count and min(values) >= least else None

    def collapsed(self, name: str, share: float) -> tuple[float, float] | None:
        """Return a metric's start and its value now if it fell to `share` or less while the score did not rise."""
        start, now = self.start(name), self.now(name)
        if start is None or now is None or now > share * start or not self.flat():
            return None
        return (start, now) if self.fell(name, lambda high, low: low <= share * high) else None

    def flat(self, count: int = 5) -> bool:
        """Return whether the mean score of the last steps is not above that of the first ones by its standard error."""
        now, scores = self.now(SCORE, count), finite(SCORE, self.first)
        if now is None or len(scores) < 2:
            return False
        return now <= fmean(scores) + stdev(scores) / math.sqrt(len(scores))

    def rose(self, name: str, enough: Enough, *, by_factors: bool = True) -> tuple[float, float] | None:
        """Return a metric's lowest level and its level now if it rose: if these levels are `enough`, and the change is
        larger than usual, now or when they began to be enough. With `by_factors` its logarithm must have risen too, if
        it is defined."""
        return self._moved(name, 1, enough, by_factors)

    def fell(self, name: str, enough: Enough, *, by_factors: bool = True) -> tuple[float, float] | None:
        """Return a metric's highest level and its level now if it fell; see `rose`."""
        return self._moved(name, -1, enough, by_factors)

    def _moved(self, name: str, sign: int, enough: Enough, by_factors: bool) -> tuple[float, float] | None:
        for rows in (self.recent, self.selected):
            values = finite(name, rows)
            if by_factors and sign > 0:  # every value is many times 0, such as the gradient without a signal
                values = [value for value in values if value > 0]
            if len(values) < LEAST_STEPS:
                continue
            past, now = sign * min(sign * level for level in levels(values)), median(values[-3:])
            if not enough(past, now):
                continue
            scales = [values, [*map(math.log, values)]] if by_factors and min(values) > 0 else [values]
            if (name, sign) in self.moved or all(moved_up([sign * value for value in scale]) for scale in scales):
                self.moved.add((name, sign))
                return past, now
        self.moved.discard((name, sign))
        return None


def moved_up(values: Sequence[float]) -> bool:
    """Return whether the values rose: at once or steadily, and by more than a random walk with equal steps would. For
    values that vary around their course (not a random walk), the rise must exceed this variation."""
    middles = [median(values[start : start + 3]) for start in range(len(values) - 2)]
    changes = _changes(middles)
    # For a walk and for noise, both are the standard deviation of a change; for a trend, the second is smaller.
    usual = min(median(map(abs, changes)), median(map(abs, _changes(changes))) / math.sqrt(2))
    if max(changes) > JUMP * NORMAL * usual or steady_rise(levels(values)):
        return True
    if len(values) < 2 * SMOOTHED:
        return False
    half = SMOOTHED // 2
    noise = [values[at] - median(values[at - half : at + half + 1]) for at in range(half, len(values) - half)]
    return varies(noise) and median(values[-3:]) - min(levels(values)) > JUMP * NORMAL * median(map(abs, noise))


def varies(values: Sequence[float]) -> bool:
    """Return whether values are noise rather than a random walk. The mean square of changes is twice the variance for
    noise around a constant level, and a small part of the variance for a random walk."""
    changes = [(after - before) ** 2 for before, after in pairwise(values)]
    return len(values) > 2 and fmean(changes) >= 1.7 * variance(values)


def _changes(values: Sequence[float]) -> list[float]:
    """Return the changes over three steps."""
    return [after - before for before, after in zip(values, values[3:], strict=False)]


def steady_rise(levels: Sequence[float]) -> float:
    """Return the mean rise from one level to the next, or 0 if it is within its standard error, as with one large rise
    among small ones."""
    rises = [after - before for before, after in pairwise(levels)]
    rise = fmean(rises)
    return rise if rise > TREND * stdev(rises) / math.sqrt(len(rises)) else 0.0


def levels(values: Sequence[float]) -> list[float]:
    """Return the medians of equal parts of a series."""
    ends = [len(values) * part // PARTS for part in range(PARTS + 1)]
    return [median(values[start:end]) for start, end in pairwise(ends)]


def finite(name: str, rows: Iterable[Metrics]) -> list[float]:
    return [row[name] for row in rows if name in row and math.isfinite(row[name])]


def mean_value(values: list[float]) -> float | None:
    return fmean(values) if values else None

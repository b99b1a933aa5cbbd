"""What engines did since they were last asked, and its metrics: preemptions, cache, queue, speed, the tail."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

ITERATION = ("fixed", "running_request", "prefilled_token")  # what takes an iteration's time


@dataclass
class EngineStats:
    """Counts of one engine. Seconds are those in which it had requests: `seconds` by the number of running requests.

    `products` and `moments` are of the normal equations of ITERATION: sums over iterations of what they had, multiplied
    with each other and with their seconds.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    products: np.ndarray = field(default_factory=lambda: np.zeros((len(ITERATION), len(ITERATION))))
    moments: np.ndarray = field(default_factory=lambda: np.zeros(len(ITERATION)))
    cache_seconds: float = 0.0  # the share of the cache in use, over time
    cache_peak: float = 0.0
    waiting_peak: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens that were looked up in the prefix cache
    prefix_hits: int = 0
    tokens: int = 0  # sampled

    def observe(self, seconds: float, running: int, waiting: int, cache: float, prefilled: int) -> None:
        """Add an iteration until now, which prefilled so many tokens; the other figures are those of its end."""
        self.seconds[running] = self.seconds.get(running, 0.0) + seconds
        had = np.array([1, running, prefilled])
        self.products += np.outer(had, had)
        self.moments += had * seconds
        self.cache_seconds += seconds * cache
        self.cache_peak = max(self.cache_peak, cache)
        self.waiting_peak = max(self.waiting_peak, waiting)

    @property
    def busy(self) -> float:
        return sum(self.seconds.values())

    @property
    def tail(self) -> float:
        """The seconds in which fewer than half as many requests ran as at the peak."""
        return sum(seconds for running, seconds in self.seconds.items() if 2 * running < max(self.seconds))


def engine_metrics(engines: Sequence[EngineStats], slots: int) -> dict[str, float]:
    """Return the metrics of all engines, of which each may run `slots` requests: preemptions, queue and tokens per
    second added up, means by time, the tail of the engine with the longest. Empty if none had requests."""
    busy = [one for one in engines if one.busy > 0]
    if not busy:
        return {}
    seconds, queries = sum(one.busy for one in busy), sum(one.prefix_queries for one in busy)
    requests = sum(count * spent for one in busy for count, spent in one.seconds.items())
    return {
        "rollout/preemptions": sum(one.preemptions for one in busy),
        "rollout/kv_cache_usage/max": max(one.cache_peak for one in busy),
        "rollout/kv_cache_usage/mean": sum(one.cache_seconds for one in busy) / seconds,
        "rollout/running_requests/max": max(max(one.seconds) for one in busy),
        "rollout/running_requests/mean": requests / seconds,
        "rollout/busy_share": requests / seconds / slots,
        "rollout/waiting_requests/max": max(one.waiting_peak for one in busy),
        "rollout/prefix_cache_hit_share": sum(one.prefix_hits for one in busy) / queries if queries else 0.0,
        "rollout/tokens_per_s": sum(one.tokens / one.busy for one in busy),
        "rollout/tail_share": max(one.tail / one.busy for one in busy),
        "rollout/last_request_share": max(_alone(one) / one.busy for one in busy),
    } | _speed(busy)


def _alone(engine: EngineStats) -> float:
    return engine.seconds.get(1, 0.0) if max(engine.seconds) > 1 else 0.0


def _speed(engines: Sequence[EngineStats]) -> dict[str, float]:
    """Return the seconds of an iteration as a linear function of its running requests and of the tokens it prefills,
    fitted by least squares without negative seconds: of all choices of parts, the best one that has none."""
    zero = np.zeros(())
    products, moments = sum((one.products for one in engines), zero), sum((one.moments for one in engines), zero)
    best, least = np.zeros(len(ITERATION)), 0.0
    for size in range(1, len(ITERATION) + 1):
        for parts in map(list, combinations(range(len(ITERATION)), size)):
            fitted = np.zeros(len(ITERATION))
            fitted[parts] = np.linalg.lstsq(products[np.ix_(parts, parts)], moments[parts], rcond=None)[0]
            error = float(fitted @ products @ fitted - 2 * fitted @ moments)  # less what no choice changes
            if (fitted >= 0).all() and error < least:
                best, least = fitted, error
    return {f"rollout/iteration_s/{name}": seconds for name, seconds in zip(ITERATION, best.tolist(), strict=True)}

"""What engines did since they were last asked, and its metrics: preemptions, cache, queue, speed, the tail."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class EngineStats:
    """Counts of one engine. Seconds are those in which it had requests, with their tokens: both by the number of
    running requests."""

    seconds: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    cache_seconds: float = 0.0  # the share of the cache in use, over time
    cache_peak: float = 0.0
    waiting_peak: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens that were looked up in the prefix cache
    prefix_hits: int = 0

    def observe(self, seconds: float, running: int, waiting: int, cache: float, tokens: int) -> None:
        """Add the time until now and its tokens; the other figures are those of its end."""
        self.seconds[running] = self.seconds.get(running, 0.0) + seconds
        self.tokens[running] = self.tokens.get(running, 0) + tokens
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
        "rollout/tokens_per_s": sum(sum(one.tokens.values()) / one.busy for one in busy),
        "rollout/tail_share": max(one.tail / one.busy for one in busy),
        "rollout/last_request_share": max(_alone(one) / one.busy for one in busy),
    } | _speed(busy)


def _alone(engine: EngineStats) -> float:
    return engine.seconds.get(1, 0.0) if max(engine.seconds) > 1 else 0.0


def _speed(engines: Sequence[EngineStats]) -> dict[str, float]:
    """Return a line through the seconds per token of each running request, by the number of those that run.

    Every point weighs as much as its iterations, of which each gives every running request a token: so the line keeps
    the seconds of all.
    """
    seconds = sum((Counter(one.seconds) for one in engines), Counter())
    tokens = sum((Counter(one.tokens) for one in engines), Counter())
    running = np.array([count for count in sorted(tokens) if count and tokens[count]])
    if not running.size:
        return {}
    iterations = np.array([tokens[count] / count for count in running])
    each = np.array([seconds[count] for count in running]) / iterations
    middle, mean = np.average(running, weights=iterations), np.average(each, weights=iterations)
    spread = float(np.sum(iterations * (running - middle) ** 2))
    slope = float(np.sum(iterations * (running - middle) * (each - mean))) / spread if spread else 0.0
    slope = min(max(slope, 0.0), mean / middle)  # neither faster with more requests nor, with none, below zero
    return {
        "rollout/seconds_per_token/alone": float(mean - slope * (middle - 1)),
        "rollout/seconds_per_token/further_request": slope,
    }

"""Engine statistics, from what vLLM's scheduler reports after every iteration."""

import time

from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import SchedulerStats

from hybridrl.core.rollout.statistics import EngineStats


class Observer(StatLoggerBase):
    """One of vLLM's stat loggers, which only adds up."""

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.running = self.sampled = self.prefilled = self.hits = 0
        self.since: float | None = None  # the end of the last iteration, or the first request after a pause

    def submitted(self) -> None:
        """Note that the engine gets a request."""
        if self.since is None:
            self.since = time.monotonic()

    def idle(self) -> None:
        """Note that the engine has no request any more."""
        self.running, self.since = 0, None

    def take(self) -> EngineStats:
        """Return what was added up since the last call."""
        taken, self.stats = self.stats, EngineStats()
        return taken

    def record(self, scheduler_stats: SchedulerStats | None, *_: object, **__: object) -> None:
        """Add an iteration; `sampled` and `prefilled` have its tokens by then."""
        sampled, self.sampled, prefilled, self.prefilled = self.sampled, 0, self.prefilled, 0
        if scheduler_stats is None:
            return
        now, running = time.monotonic(), scheduler_stats.num_running_reqs
        waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        hits = scheduler_stats.prefix_cache_stats.hits
        self.hits += hits
        self.stats.prefix_queries += scheduler_stats.prefix_cache_stats.queries
        self.stats.prefix_hits += hits
        if self.since is not None:  # otherwise it is the probe of a weight sync
            # Requests that finished in this iteration ran in it, and so did those that were admitted.
            in_iteration, computed = max(running, self.running), max(prefilled - self.hits, 0)
            self.hits = max(self.hits - prefilled, 0)  # of prompts that are not complete yet
            self.stats.observe(now - self.since, in_iteration, waiting, scheduler_stats.kv_cache_usage, computed)
            self.stats.tokens += sampled
        self.running, self.since = running, now
        if not running and not waiting:
            self.since, self.hits = None, 0

    def log_engine_initialized(self) -> None:
        return

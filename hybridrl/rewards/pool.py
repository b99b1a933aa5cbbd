"""Scores requests in processes, each response within a time limit; requests in, one Score each out.

A library's process pool would run the driver's main module again in each process, is lost as a whole when an idle
process is killed from outside, and does not kill what a hung scorer has started.
"""

import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hybridrl.config import ConfigError
from hybridrl.config.schema_algorithm import RewardConfig
from hybridrl.rewards.load import in_one_call, processes
from hybridrl.rewards.process import CallerScorer, ScoringProcess
from hybridrl.rewards.score import Score, ScoringRequest

_MOST_AT_ONCE = 256  # requests sent to a scorer together: enough that sending is cheap compared with scoring


class Scorer(Protocol):
    """Scores requests one list at a time: in this process, in one that it supervises, or on another machine."""

    def start(self) -> bool:
        """Load the reward; return whether it reads token ids. ConfigError: it could not be loaded. ScorerDied: it was
        killed meanwhile, and another attempt may succeed."""

    def score(self, requests: Sequence[ScoringRequest]) -> Iterator[Score]:
        """Yield one Score per request, in order."""

    def stop(self) -> None:
        """End what is running and do not start again; from any thread."""

    def close(self) -> None:
        """Release the connection; from the thread that called the other methods."""


@dataclass
class _Job:
    request: ScoringRequest
    future: Future[Score]
    tries_left: int


class ScorerPool:
    """Scores requests with `scorers`, by default `config.num_workers` processes of this machine; 0: in the caller.

    Opening it waits until every scorer has loaded the reward, unless `wait` is false. `data_sources` are those of the
    rows. What a reward function prints goes to `log_path`, or to the driver's output. With `in_one_call` the function
    is called once for all requests of a `submit`.
    """

    def __init__(
        self,
        config: RewardConfig,
        log_path: Path | None = None,
        data_sources: Collection[str] = (),
        scorers: Sequence[Scorer] | None = None,
        wait: bool = True,
    ) -> None:
        self._retries, self.in_one_call = config.retries, in_one_call(config)
        self._inline = config.num_workers == 0
        if scorers is None:
            here = [CallerScorer(config, data_sources)] if self._inline else []
            scorers = here or [ScoringProcess(config, data_sources, log_path) for _ in range(processes(config))]
        self._scorers = list(scorers)
        self._waiting: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._loaded: list[bool] = [self._scorers[0].start()] if self._inline else []
        self._end: Exception | None = None  # why nothing is scored any more
        served = [] if self._inline else self._scorers
        self._threads = [threading.Thread(target=self._serve, args=[scorer], daemon=True) for scorer in served]
        for thread in self._threads:
            thread.start()
        if wait:
            self.wait_until_loaded()

    def wait_until_loaded(self) -> None:
        """Wait until every scorer has loaded the reward; if one cannot, close the pool and raise ConfigError."""
        with ExitStack() as undo:
            undo.callback(self.close)
            with self._changed:
                self._changed.wait_for(lambda: self._end is not None or len(self._loaded) == len(self._scorers))
            if self._end is not None:
                raise self._end
            undo.pop_all()

    @property
    def takes_tokens(self) -> bool:
        """Whether the reward reads the token ids of the responses."""
        return any(self._loaded)

    def submit(self, requests: list[ScoringRequest]) -> list[Future[Score]]:
        """Return one future per request, from any thread; it resolves to a Score and cannot be cancelled.

        Raises if nothing can be scored any more: after `close`, when a process started in place of a lost one could
        not load the reward, or when a scorer itself failed, which the futures of its requests then raise as well.
        """
        jobs = [_Job(request, Future(), self._retries) for request in requests]
        with self._changed:
            if self._end is not None:
                raise self._end
            for job in jobs:
                job.future.set_running_or_notify_cancel()
            self._waiting.extend(jobs)
            self._changed.notify_all()
        while self._inline and self._waiting:
            taken, self._waiting = self._waiting, deque()
            self._score(self._scorers[0], taken)
        return [job.future for job in jobs]

    def close(self) -> None:
        """Stop the scorers; requests not scored yet resolve to the fault "died"."""
        self._stop(RuntimeError("the scorer pool is closed"))
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> "ScorerPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, scorer: Scorer) -> None:
        """Run one scorer until the pool is closed, in a thread of its own."""
        jobs: deque[_Job] = deque()
        try:
            takes_tokens = scorer.start()
            with self._changed:
                self._loaded.append(takes_tokens)
                self._changed.notify_all()
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting or self._end is not None)
                    # Fewer as the queue runs dry, so that all scorers finish together; none at the end.
                    fair_share = -(-len(self._waiting) // (2 * len(self._scorers)))
                    count = len(self._waiting) if self.in_one_call else min(fair_share, _MOST_AT_ONCE)
                    jobs = deque(self._waiting.popleft() for _ in range(count))
                if not jobs:
                    break
                self._score(scorer, jobs)
        except ConfigError as error:
            self._stop(error, jobs)
        except Exception as error:  # no fault of the grader: nobody knows what its responses are worth
            self._stop(error, jobs, raises=self._end is None)  # or it is closed, and the scorer says that
        finally:
            scorer.close()

    def _score(self, scorer: Scorer, jobs: deque[_Job]) -> None:
        """Resolve the jobs in order; a faulty one goes back to the queue while it has tries left."""
        for score in scorer.score([job.request for job in jobs]):
            job = jobs.popleft()
            if score.fault is not None and job.tries_left:
                job.tries_left -= 1
                with self._changed:
                    if self._end is None:
                        self._waiting.append(job)
                        self._changed.notify_all()
                        continue
            job.future.set_result(score)

    def _stop(self, reason: Exception, jobs: Sequence[_Job] = (), *, raises: bool = False) -> None:
        """Give up these jobs and all that wait, and end the scorers."""
        with self._changed:
            self._end = self._end or reason
            unscored, self._waiting = [*jobs, *self._waiting], deque()
            self._changed.notify_all()
        for scorer in self._scorers:
            scorer.stop()
        for job in unscored:
            if raises:
                job.future.set_exception(reason)
            else:
                job.future.set_result(Score(None, fault="died", detail=f"not scored: {reason}"))

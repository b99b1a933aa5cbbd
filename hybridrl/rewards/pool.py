"""Scores requests in processes, each response within a time limit; requests in, one Score each out.

A library's process pool does not do: it would run the driver's main module again in each process; it is lost as a
whole when an idle process is killed from outside; and it does not kill the processes of a hung scorer. Limits and
faults are those of `process.py`; a run's processes are in the actors of `actors.py`.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from hybridrl.config import ConfigError
from hybridrl.config.schema_parts import RewardConfig
from hybridrl.rewards.load import processes, unit_of
from hybridrl.rewards.process import CallerScorer, ScoringProcess
from hybridrl.rewards.score import Score, ScoringRequest

_MOST_AT_ONCE = 256  # requests sent to a scorer together: enough that sending is cheap compared with scoring
_RESTARTS = 3  # per actor, if it dies before it has loaded the reward
_STOP_TIMEOUT = 10.0


class Scorer(Protocol):
    """Scores requests one list at a time: in this process, in one that it supervises, or on another machine."""

    def start(self) -> bool:
        """Load the reward; return whether it reads token ids. Raises ConfigError, or ScorerDied: try again then."""

    def score(self, requests: Sequence[ScoringRequest]) -> Iterator[Score]:
        """Yield one Score per request, in order."""

    def stop(self) -> None:
        """End what is running and do not start again; from any thread."""

    def close(self) -> None:
        """Release the connection; from the thread that called the other methods."""


_OnScore = Callable[[int, Score | Exception], object]  # called with the index of a request


@dataclass(eq=False)
class _Call:
    """One call of `ScorerPool.score`."""

    scored: _OnScore


@dataclass(slots=True)
class _Job:
    request: ScoringRequest
    index: int  # in its call
    call: _Call
    tries_left: int


class ScorerPool:
    """Scores requests with `scorers`, by default `config.num_workers` processes of this machine; 0: in the caller.

    Opening it waits until every scorer has loaded the reward, unless `wait` is false. `data_sources` are those of the
    rows; `log_path`, or the output, gets what a reward prints. One call of a scorer has all requests of a
    `score` if `per` is "step" or "group".
    """

    def __init__(
        self,
        config: RewardConfig,
        log_path: Path | None = None,
        data_sources: Collection[str] = (),
        scorers: Sequence[Scorer] | None = None,
        wait: bool = True,
    ) -> None:
        self.per: Literal["response", "group", "step"] = unit_of(config)
        self._retries, self._inline = config.retries, config.num_workers == 0
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
        with contextlib.ExitStack() as undo:
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

    def score(self, requests: Sequence[ScoringRequest], scored: _OnScore) -> None:
        """Score requests, from any thread. `scored` is called once for each, in any thread, as soon as its Score is
        known, and must not raise. It gets an error instead if a scorer itself failed.

        Raises if nothing can be scored any more: after `close`; when the replacement of a lost process could not load
        the reward; when a scorer itself failed.
        """
        call = _Call(scored)
        with self._changed:
            if self._end is not None:
                raise self._end
            self._waiting.extend(_Job(request, index, call, self._retries) for index, request in enumerate(requests))
            self._changed.notify_all()
        while self._inline and self._waiting:
            self._score(self._scorers[0], self._take(len(self._waiting)))

    def submit(self, requests: Sequence[ScoringRequest]) -> list[Future[Score]]:
        """Return one future per request, which cannot be cancelled; see `score`."""
        futures: list[Future[Score]] = [Future() for _ in requests]
        for future in futures:
            future.set_running_or_notify_cancel()

        def resolve(index: int, score: Score | Exception) -> None:
            if isinstance(score, Exception):
                futures[index].set_exception(score)
            else:
                futures[index].set_result(score)

        self.score(requests, resolve)
        return futures

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
                    jobs = self._take(min(fair_share, _MOST_AT_ONCE))
                if not jobs:
                    break
                self._score(scorer, jobs)
        except ConfigError as error:
            self._stop(error, jobs)
        except Exception as error:  # no fault of the grader: nobody knows what its responses are worth
            self._stop(error, jobs, raises=self._end is None)  # or it is closed, and the scorer says that
        finally:
            scorer.close()

    def _take(self, count: int) -> deque[_Job]:
        """Take a number of waiting jobs; or all of them, or those of one group, if they are scored in one call."""
        if self.per == "group" and self._waiting:
            count = sum(job.call is self._waiting[0].call for job in self._waiting)
        elif self.per == "step":
            count = len(self._waiting)
        return deque(self._waiting.popleft() for _ in range(count))

    def _score(self, scorer: Scorer, jobs: deque[_Job]) -> None:
        """Resolve the jobs in order; a faulty one goes back to the queue while it has tries left, a group as a
        whole."""
        scores: Iterable[Score] = scorer.score([job.request for job in jobs])
        if self.per == "group":
            scores = list(scores)
            if any(score.fault is not None for score in scores) and jobs[0].tries_left and self._put_back(jobs):
                return
        for score in scores:
            job = jobs.popleft()
            again = self.per != "group" and score.fault is not None and job.tries_left
            if not (again and self._put_back([job])):
                job.call.scored(job.index, score)

    def _put_back(self, jobs: Iterable[_Job]) -> bool:
        """Let these jobs wait for another try; return whether the pool is open."""
        with self._changed:
            if self._end is not None:
                return False
            for job in jobs:
                job.tries_left -= 1
                self._waiting.append(job)
            self._changed.notify_all()
        return True

    def _stop(self, reason: Exception, jobs: Sequence[_Job] = (), *, raises: bool = False) -> None:
        """Give up these jobs and all that wait, and end the scorers."""
        with self._changed:
            self._end = self._end or reason
            unscored, self._waiting = [*jobs, *self._waiting], deque()
            self._changed.notify_all()
        for scorer in self._scorers:
            scorer.stop()
        for job in unscored:
            died = Score(None, fault="died", detail=f"not scored: {reason}")
            job.call.scored(job.index, reason if raises else died)

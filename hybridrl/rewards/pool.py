"""Answers in, one Score each out, from processes in which no answer takes longer than its time limit.

Own code, since a library's pool runs the driver's main module again in each process, is lost as a whole where
an idle process is killed from outside, and leaves alive what a hung scorer has started.
"""

import threading
from collections import deque
from concurrent.futures import Future
from pathlib import Path

from hybridrl.config.schema import RewardConfig
from hybridrl.rewards.load import load_reward
from hybridrl.rewards.process import ScoringProcess
from hybridrl.rewards.score import Answer, Score, score_answer

_MOST_AT_ONCE = 64  # answers sent to a process together: enough that sending costs little beside scoring

_Job = tuple[Answer, Future[Score]]


class ScorerPool:
    """Scores answers in `config.num_workers` processes; 0: in the caller's thread and without a time limit.

    Opening it waits until every process has loaded the reward; ConfigError says why one could not.
    What a reward function prints goes to the file `log_path`, or to the driver's own output.
    """

    def __init__(self, config: RewardConfig, log_path: Path | None = None):
        self._reward_here = load_reward(config) if config.num_workers == 0 else None
        self._processes = [ScoringProcess(config, log_path) for _ in range(config.num_workers)]
        self._waiting: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._loaded = 0
        self._end: Exception | None = None  # why nothing is scored any more
        self._threads = [threading.Thread(target=self._serve, args=[p], daemon=True) for p in self._processes]
        for thread in self._threads:
            thread.start()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._end is not None or self._loaded == len(self._processes))
            if self._end is not None:
                raise self._end
        except BaseException:
            self.close()
            raise

    def submit(self, answers: list[Answer]) -> list[Future[Score]]:
        """A future for each answer, from any thread; it always resolves to a Score and cannot be cancelled.

        Raises where nothing can be scored any more: after `close`, or when a process started in place of
        a lost one could not load the reward.
        """
        jobs: list[_Job] = [(answer, Future()) for answer in answers]
        with self._changed:
            if self._end is not None:
                raise self._end
            for _, future in jobs:
                future.set_running_or_notify_cancel()
            if self._reward_here is None:
                self._waiting.extend(jobs)
                self._changed.notify_all()
        if self._reward_here is not None:
            for answer, future in jobs:
                future.set_result(score_answer(self._reward_here, answer))
        return [future for _, future in jobs]

    def close(self) -> None:
        """Kill the processes; what is not scored yet resolves to the fault "died"."""
        self._stop(RuntimeError("the scorer pool is closed"))
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> "ScorerPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, process: ScoringProcess) -> None:
        """What one process's thread does for as long as the pool is open."""
        jobs: deque[_Job] = deque()
        try:
            process.start()
            with self._changed:
                self._loaded += 1
                self._changed.notify_all()
            while jobs := self._take():
                _score(process, jobs)
        except Exception as error:
            self._stop(error)
            _give_up(jobs, error)

    def _take(self) -> deque[_Job]:
        """A process's next jobs: fewer as the queue runs dry, so all finish together; none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._end is not None)
            fair_share = -(-len(self._waiting) // (2 * len(self._processes)))
            return deque(self._waiting.popleft() for _ in range(min(fair_share, _MOST_AT_ONCE)))

    def _stop(self, reason: Exception) -> None:
        with self._changed:
            self._end = self._end or reason
            unscored, self._waiting = self._waiting, deque()
            self._changed.notify_all()
        for process in self._processes:
            process.stop()
        _give_up(unscored, reason)


def _score(process: ScoringProcess, jobs: deque[_Job]) -> None:
    """Resolve the jobs in order; one that costs the process its life costs the others nothing."""
    process.send([answer for answer, _ in jobs])
    while jobs:
        score = process.receive()
        _, future = jobs.popleft()
        future.set_result(score)
        if score.fault in ("timeout", "died"):
            process.start()
            process.send([answer for answer, _ in jobs])


def _give_up(jobs: deque[_Job], reason: Exception) -> None:
    for _, future in jobs:
        future.set_result(Score(None, fault="died", detail=f"not scored: {reason}"))

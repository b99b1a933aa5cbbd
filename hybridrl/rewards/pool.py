"""Answers in, one Score each out, from processes in which no answer takes longer than its time limit.

Own code, since a library's pool runs the driver's main module again in each process, is lost as a whole where
an idle process is killed from outside, and leaves alive what a hung scorer has started.
"""

import threading
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

from hybridrl.config.schema_reward import RewardConfig
from hybridrl.rewards.built_in import CPU_SECONDS
from hybridrl.rewards.load import load_reward
from hybridrl.rewards.managers import in_one_call, processes
from hybridrl.rewards.process import ScoringProcess
from hybridrl.rewards.score import Answer, Score
from hybridrl.rewards.worker import Scoring

_MOST_AT_ONCE = 64  # answers sent to a process together: enough that sending costs little beside scoring


@dataclass
class _Job:
    answer: Answer
    future: Future[Score]
    tries_left: int
    note: str = ""


class ScorerPool:
    """Scores answers in `config.num_workers` processes; 0: in the caller's thread and without a time limit.

    Opening it waits until every process has loaded the reward; ConfigError says why one could not. `data_sources` are
    those of the rows. What a reward function prints goes to the file `log_path`, or to the driver's own output.
    With `in_one_call` the function is called once for all answers of a `submit`.
    """

    def __init__(self, config: RewardConfig, log_path: Path | None = None, data_sources: Collection[str] = ()):
        self._config, self.in_one_call = config, in_one_call(config)
        self._here = Scoring(load_reward(config, data_sources), config) if config.num_workers == 0 else None
        self._processes = [ScoringProcess(config, data_sources, log_path) for _ in range(processes(config))]
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

    @property
    def takes_tokens(self) -> bool:
        """Whether the reward asks for the answers' `response_ids`."""
        return self._here.takes_tokens if self._here else any(process.takes_tokens for process in self._processes)

    def submit(self, answers: list[Answer]) -> list[Future[Score]]:
        """A future for each answer, from any thread; it always resolves to a Score and cannot be cancelled.

        Raises where nothing can be scored any more: after `close`, or when a process started in place of
        a lost one could not load the reward.
        """
        jobs = [_Job(answer, Future(), self._config.retries) for answer in answers]
        with self._changed:
            if self._end is not None:
                raise self._end
            for job in jobs:
                job.future.set_running_or_notify_cancel()
            self._waiting.extend(jobs)
            self._changed.notify_all()
        while self._here is not None and self._waiting:
            here, self._waiting = list(self._waiting), deque()
            for job, score in zip(here, self._here.scores([job.answer for job in here]), strict=True):
                self._settle(job, score)
        return [job.future for job in jobs]

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
                self._score(process, jobs)
        except Exception as error:
            self._stop(error)
            _give_up(jobs, error)
        finally:
            process.close()

    def _take(self) -> deque[_Job]:
        """A process's next jobs: fewer as the queue runs dry, so all finish together; none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._end is not None)
            fair_share = -(-len(self._waiting) // (2 * len(self._processes)))
            count = len(self._waiting) if self.in_one_call else min(fair_share, _MOST_AT_ONCE)
            return deque(self._waiting.popleft() for _ in range(count))

    def _score(self, process: ScoringProcess, jobs: deque[_Job]) -> None:
        """Resolve the jobs in order; one that costs the process its life costs the others nothing."""
        process.send([job.answer for job in jobs])
        while jobs:
            score = process.receive()
            job = jobs.popleft()
            if score.fault == "overran" and job.answer.solution:
                job.note = f"it took more than {CPU_SECONDS} s of CPU time to judge, and counts as an empty answer"
                job.answer = replace(job.answer, solution="")
                jobs.appendleft(job)
            else:
                self._settle(job, score)
            if process.lost:
                while self.in_one_call and jobs:  # the call was theirs too
                    self._settle(jobs.popleft(), score)
                process.start()
                if jobs:
                    process.send([job.answer for job in jobs])

    def _settle(self, job: _Job, score: Score) -> None:
        """Resolve the job, or put it back where it failed and may be tried again."""
        if score.fault is None or not job.tries_left:
            job.future.set_result(replace(score, detail=job.note) if job.note else score)
            return
        job.tries_left -= 1
        with self._changed:
            if self._end is None:
                self._waiting.append(job)
                self._changed.notify_all()
                return
        job.future.set_result(score)

    def _stop(self, reason: Exception) -> None:
        with self._changed:
            self._end = self._end or reason
            unscored, self._waiting = self._waiting, deque()
            self._changed.notify_all()
        for process in self._processes:
            process.stop()
        _give_up(unscored, reason)


def _give_up(jobs: deque[_Job], reason: Exception) -> None:
    for job in jobs:
        job.future.set_result(Score(None, fault="died", detail=f"not scored: {reason}"))

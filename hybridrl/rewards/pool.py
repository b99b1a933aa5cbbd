"""Scores requests in processes, each response within a time limit; requests in, one Score each out.

A library's process pool does not do: it would run the driver's main module again in each process; it is lost as a
whole when an idle process is killed from outside; and it does not kill the processes of a hung scorer.

Of a run one Ray actor per machine decodes responses and supervises scoring processes. These actors take no CPU from
Ray's accounting. Limits and faults are those of `process.py`.
"""

import contextlib
import functools
import gc
import os
import pickle
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from hybridrl.config import ConfigError
from hybridrl.config.schema_parts import RewardConfig
from hybridrl.core.cluster import Actor, RaySession, WorkerDied, gather, kill, spawn
from hybridrl.required import required
from hybridrl.rewards.load import in_one_call, processes, seconds_between_calls
from hybridrl.rewards.process import LOAD_TIMEOUT, CallerScorer, Launch, ScorerDied, ScoringProcess
from hybridrl.rewards.score import WRITTEN, WRITTEN_IDS, Score, ScoringRequest
from hybridrl.runtime.guard import begin_actor
from hybridrl.tracking.console import warn
from hybridrl.tracking.faults import KILLED

_MOST_AT_ONCE = 256  # requests sent to a scorer together: enough that sending is cheap compared with scoring
_RESTARTS = 3  # per actor, if it dies before it has loaded the reward
_STOP_TIMEOUT = 10.0

Decode = Callable[[Sequence[int] | np.ndarray], str]
Reason = tuple[type[Exception], str]  # why scoring ends: ConfigError or ScorerDied, and its message
# The last two: the driver's, and its host.
Setup = tuple[RewardConfig, frozenset[str], Callable[[], Decode], Launch, str]


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


@dataclass
class _Job:
    request: ScoringRequest
    future: Future[Score]
    tries_left: int


class ScorerPool:
    """Scores requests with `scorers`, by default `config.num_workers` processes of this machine; 0: in the caller.

    Opening it waits until every scorer has loaded the reward, unless `wait` is false. `data_sources` are those of the
    rows; `log_path`, or the output, gets what a reward prints. With `per` "step" one call has all of a `submit`.
    """

    def __init__(
        self,
        config: RewardConfig,
        log_path: Path | None = None,
        data_sources: Collection[str] = (),
        scorers: Sequence[Scorer] | None = None,
        wait: bool = True,
    ) -> None:
        self.per: Literal["response", "group", "step"] = "step" if in_one_call(config) else "response"
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

    def submit(self, requests: list[ScoringRequest]) -> list[Future[Score]]:
        """Return one future per request, from any thread; it resolves to a Score and cannot be cancelled.

        Raises if nothing can be scored any more: after `close`; when the replacement of a lost process could not load
        the reward; when a scorer itself failed (the futures of its requests raise this as well).
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
                    count = len(self._waiting) if self.per == "step" else min(fair_share, _MOST_AT_ONCE)
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


def open_scorer_pool(
    session: RaySession, config: RewardConfig, logs: Path, data_sources: Collection[str], load: Callable[[], Decode]
) -> ScorerPool:
    """Return a pool whose `reward.num_workers` processes are spread over the machines of the session.

    Requests may hold token ids instead of text: `load`, which returns their decoder, is pickled and called once per
    actor. What a reward prints goes to reward.log in `logs`, on further machines to reward-1.log and so on. The actors
    load in parallel with what else starts: call `wait_until_loaded` before the first step.
    """
    if config.num_workers == 0:
        return ScorerPool(config, scorers=[DecodingScorer(CallerScorer(config, data_sources), load())])
    total, machines = processes(config), len(session.first_devices)
    shares = [total // machines + (machine < total % machines) for machine in range(machines)]
    setup = config, frozenset(data_sources), load, Launch.here(), socket.gethostname()
    scorers: list[Scorer] = []
    for machine, share in enumerate(shares):
        scorers += _start_actor(session, machine, share, logs, setup) if share else []
    return ScorerPool(config, scorers=scorers, wait=False)


def _start_actor(session: RaySession, machine: int, share: int, logs: Path, setup: Setup) -> list["RemoteScorer"]:
    """Start the ScoringActor of a machine; return a scorer for each of its processes."""
    log, reward_log = f"{logs}/scoring-{machine}.log", f"{logs}/reward{f'-{machine}' * bool(machine)}.log"
    arguments = ScoringActor, session, session.first_devices[machine], {}, log, reward_log, share, setup
    start = functools.partial(spawn, *arguments, max_concurrency=share + 1)  # one call per process, and `stop`
    actor = ReplacedActor(start, share, log)
    return [RemoteScorer(actor, index, setup[0]) for index in range(share)]


class ReplacedActor:
    """A ScoringActor, which is replaced when it is lost; `share` scorers use it, each from its thread."""

    def __init__(self, start: Callable[[], Actor], share: int, log: str) -> None:
        self._start, self._share, self._log, self._handle = start, share, log, start()
        self._changing, self._alone = threading.Lock(), threading.Lock()
        self._places, self._stopped = threading.Semaphore(share), False
        self.lost: WorkerDied | None = None  # how it was lost last

    def call(self, method: str, *arguments: Any, seconds: float, key: str, alone: bool = False) -> Any:
        """Return the result of a call, next to which no other runs if it is `alone`; None if the actor was lost."""
        with contextlib.ExitStack() as taken:
            for place in [self._alone, *[self._places] * self._share] if alone else [self._places]:
                taken.enter_context(place)
            handle = self._handle
            try:
                ref = getattr(handle, method).remote(*arguments)
                return gather([ref], f"scorer.{method}", seconds, [self._log], key=key)[0]
            except WorkerDied as lost:
                with self._changing:
                    if self._stopped:
                        raise
                    if self.lost and KILLED.search(f"{self.lost}") and KILLED.search(f"{lost}"):
                        raise ScorerDied(f"{lost}") from lost  # for the second time
                    if self._handle is handle:
                        warn(f"a scoring actor was lost: {lost.cause or lost}; its log: {self._log}", lost.code)
                        kill(handle)
                        self._handle, self.lost = self._start(), lost
        return None

    def stop(self) -> None:
        """End the actor, once."""
        with self._changing:
            if not self._stopped:
                self._stopped = True
                with contextlib.suppress(Exception):  # it or Ray may have ended, and nothing needs its result
                    gather([self._handle.stop.remote()], "scorer.stop", _STOP_TIMEOUT)
                kill(self._handle)


class DecodingScorer:
    """Decodes responses given as token ids only, passes them to `scorer`, and adds the text to the Score."""

    def __init__(self, scorer: Scorer, decode: Decode) -> None:
        self._scorer, self._decode = scorer, decode
        self._takes_tokens: bool | None = None  # None: not started
        self.stop, self.close = scorer.stop, scorer.close

    def start(self) -> bool:
        self._takes_tokens = self._scorer.start()
        return self._takes_tokens

    def score(self, requests: Sequence[ScoringRequest]) -> Iterator[Score]:
        if self._takes_tokens is None:  # in an actor that took the place of another
            self.start()
        texts, ready = [], []
        for request in requests:
            texts.append(self._decode(required(request.response_ids)) if request.solution is None else None)
            text = request.solution if texts[-1] is None else texts[-1]
            ids = np.asarray(request.response_ids).tolist() if self._takes_tokens else None  # None remains None
            extra = self._decoded(request.extra_info)
            ready.append(replace(request, solution=text, extra_info=extra, response_ids=ids))
        for text, score in zip(texts, self._scorer.score(ready), strict=True):
            yield score if text is None else replace(score, text=text)

    def _decoded(self, extra_info: dict[str, Any]) -> dict[str, Any]:
        if WRITTEN_IDS not in extra_info:
            return extra_info
        texts = map(self._decode, extra_info[WRITTEN_IDS])
        return {name: value for name, value in extra_info.items() if name != WRITTEN_IDS} | {WRITTEN: "\n".join(texts)}


class ScoringActor:
    """The Ray actor of one machine: `share` scoring processes and a decoder, with a thread per process."""

    def __init__(self, log: str, reward_log: str, share: int, setup: Setup) -> None:
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        begin_actor(log)
        config, data_sources, load, driver, driver_host = setup
        # Rewards see what they would see as children of the driver; a further machine adds what is its own.
        environment = driver.environment | ({} if socket.gethostname() == driver_host else dict(os.environ))
        directory = driver.directory if os.path.isdir(driver.directory) else None
        launch = Launch([*driver.path, *sys.path], directory, environment)
        decode = load()
        gc.freeze()  # the many objects of the libraries need not be visited by every full collection
        self._scorers = [
            DecodingScorer(ScoringProcess(config, data_sources, Path(reward_log), launch), decode) for _ in range(share)
        ]

    def start(self, index: int) -> bool | Reason:
        """Start a process; return whether the reward reads token ids, or why it could not be loaded."""
        try:
            return self._scorers[index].start()
        except (ConfigError, ScorerDied) as error:
            return type(error), str(error)

    def score(self, index: int, content: bytes) -> bytes:
        """Score packed requests with one process; return the pickled scores, and why they end early if they do."""
        scores: list[Score] = []
        reason: Reason | None = None
        try:
            scores.extend(self._scorers[index].score(unpacked(content)))
        except (ConfigError, ScorerDied) as error:
            reason = type(error), str(error)
        return pickle.dumps((scores, reason), pickle.HIGHEST_PROTOCOL)

    def stop(self) -> None:
        """Kill the processes with all that they have started."""
        for scorer in self._scorers:
            scorer.stop()


def packed(requests: Sequence[ScoringRequest], prompts: bool = False) -> bytes:
    """Return requests as bytes, which Ray passes through: its own pickling visits every dataclass in Python. Pickling
    an array takes several times as long as the rest of its request, so that token ids become bytes first."""
    rows = []
    for request in requests:
        ids = None if request.response_ids is None else np.asarray(request.response_ids, np.int32).tobytes()
        content = request.data_source, request.solution, request.ground_truth, request.extra_info, ids
        rows.append((*content, request.prompt if prompts else None))
    return pickle.dumps(rows, pickle.HIGHEST_PROTOCOL)


def unpacked(content: bytes) -> list[ScoringRequest]:
    """Return the requests of `packed`."""
    return [
        ScoringRequest(source, solution, truth, extra, None if ids is None else np.frombuffer(ids, np.int32), prompt)
        for source, solution, truth, extra, ids, prompt in pickle.loads(content)
    ]


class RemoteScorer:
    """One process of a ScoringActor, as the pool sees it; `stop` ends the actor."""

    def __init__(self, actor: ReplacedActor, index: int, config: RewardConfig) -> None:
        self._actor, self._index, self._whole, self.stop = actor, index, in_one_call(config), actor.stop
        self._prompts = bool(config.judge.base_url)  # only a judge reads them
        # Bounds a call: the limits within the actor end it long before.
        self._seconds = LOAD_TIMEOUT + 2 * (config.timeout + seconds_between_calls(config))

    def start(self) -> bool:
        for _ in range(_RESTARTS):
            reply = self._actor.call("start", self._index, seconds=2 * LOAD_TIMEOUT, key="")
            if isinstance(reply, tuple):
                raise reply[0](reply[1])
            if reply is not None:
                return reply
        raise required(self._actor.lost)

    def score(self, requests: Sequence[ScoringRequest], *, suspects: bool = False) -> Iterator[Score]:
        """Yield one Score per request, in order. Those during which the actor was lost are `suspects`: scored again
        with no others, then in halves, until one is left, whose reward may have killed its parent."""
        limits = {"seconds": self._seconds * (1 + len(requests)), "key": "reward.timeout"}
        reply = self._actor.call("score", self._index, packed(requests, self._prompts), alone=suspects, **limits)
        if reply is not None:
            scores, reason = pickle.loads(reply)
            yield from scores
            if reason is not None:
                raise reason[0](reason[1])
            return
        self.start()  # raises if the actor cannot run at all, for which no request is to blame
        middle = len(requests) // 2 * (suspects and not self._whole)
        if suspects and not middle:
            detail = f"the scoring actor died twice while it scored this: {required(self._actor.lost).cause}"
            yield from [Score(None, fault="died", detail=detail)] * len(requests)
        else:
            for part in filter(None, (requests[:middle], requests[middle:])):
                yield from self.score(part, suspects=True)

    def close(self) -> None: ...

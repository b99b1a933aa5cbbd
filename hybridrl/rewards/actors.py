"""The scorers of a run: one Ray actor per machine decodes responses and supervises scoring processes. These actors take
no CPU from Ray's accounting."""

import contextlib
import functools
import gc
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hybridrl.config import ConfigError
from hybridrl.config.schema_parts import RewardConfig
from hybridrl.core.cluster import Actor, RaySession, WorkerDied, gather, kill, spawn
from hybridrl.required import required
from hybridrl.rewards.functions import COROUTINES
from hybridrl.rewards.load import in_one_call, processes, seconds_between_requests
from hybridrl.rewards.pool import Scorer, ScorerPool
from hybridrl.rewards.process import LOAD_TIMEOUT, CallerScorer, Launch, ScorerDied, ScoringProcess
from hybridrl.rewards.score import WRITTEN, WRITTEN_IDS, Score, ScoringRequest
from hybridrl.runtime.guard import begin_actor
from hybridrl.tracking.console import warn
from hybridrl.tracking.faults import KILLED

_RESTARTS = 3  # per actor, if it dies before it has loaded the reward
_STOP_TIMEOUT = 10.0

Decode = Callable[[Sequence[int] | np.ndarray], str]
Reason = tuple[type[Exception], str]  # why scoring ends: ConfigError or ScorerDied, and its message
# The last two: the driver's, and its host.
Setup = tuple[RewardConfig, frozenset[str], Callable[[], Decode], Launch, str]


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
    shares = shares_of_machines(config, len(session.first_devices))
    setup = config, frozenset(data_sources), load, Launch.here(), socket.gethostname()
    scorers: list[Scorer] = []
    for machine, share in enumerate(shares):
        scorers += _start_actor(session, machine, share, logs, setup) if share else []
    return ScorerPool(config, scorers=scorers, wait=False)


def shares_of_machines(config: RewardConfig, machines: int) -> list[int]:
    """Return the number of scoring processes of each machine."""
    total = processes(config)
    return [total // machines + (machine < total % machines) for machine in range(machines)]


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
        self._prompts = config.judged  # only a judge reads them
        # Bounds a call: the limits within the actor end it long before.
        self._seconds = LOAD_TIMEOUT + 2 * (config.timeout + COROUTINES * seconds_between_requests(config))

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

"""Experience whose engine needs virtual time for each token: who waits for whom, and for how long, is exact and takes
no time."""

import asyncio
import contextlib
import selectors
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from hybridrl.core.cluster.dispatch import ActorLost
from hybridrl.core.experience.asynchronous import AsynchronousExperience, LoopThread
from hybridrl.core.experience.collector import SamplingPlan
from hybridrl.core.experience.episodes import EpisodeRunner
from hybridrl.core.experience.responses import ResponseStore
from hybridrl.core.rollout import Completion, Request, RolloutClient, Sampling
from hybridrl.data.order import PromptOrder
from hybridrl.data.prompts import Prompt
from hybridrl.required import required
from hybridrl.rewards.score import FaultGuard, Score

PER_TOKEN = 1.0  # virtual seconds


class VirtualTime(asyncio.SelectorEventLoop):
    """A loop that does not wait for its timers: the time of the next one comes at once, unless it `stands`."""

    def __init__(self) -> None:
        self.now, self.stands = 0.0, False
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTime) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout=None):
        if timeout:
            if ready := super().select(0):
                return ready
            if self.loop.stands:
                return super().select(None)
            self.loop.now += timeout
        return super().select(timeout and 0)


class LengthLaw(Protocol):
    """How many tokens a response has in all, if the weights stay as they are until its end."""

    def of(self, request: Request) -> int: ...


@dataclass
class Lengths:
    """The length of each response by prompt and sample; what is not given is short."""

    known: dict[tuple[int, int], int] = field(default_factory=dict)
    short: int = 2

    def of(self, request: Request) -> int:
        return self.known.get((request.prompt, request.sample), self.short)


class Engine:
    """Works on `slots` requests at a time, in their order, and dies as its `deaths` numbers of `take` come."""

    def __init__(self, lengths: LengthLaw, slots: int, deaths: frozenset[int] = frozenset()) -> None:
        self.lengths, self.slots, self.deaths = lengths, slots, deaths
        self.version = 0
        self.requests: list[tuple[int, Request]] = []
        self.done: dict[int, int] = {}  # tokens by ticket
        self.finished: list[tuple[int, Completion]] = []
        self.wake = asyncio.Event()
        self.takes, self.dead = 0, False
        self.worked = 0.0

    def submit(self, requests, goal=None) -> None:
        self._work()
        self.requests += requests
        self.done |= dict.fromkeys((ticket for ticket, _ in requests), 0)
        self.wake.set()

    def interrupt(self) -> None:
        self._work()
        for ticket, request in self.requests:
            self.finished.append((ticket, self._completion(request, self.done.pop(ticket), interrupted=True)))
        self.requests = []
        self.wake.set()

    async def take(self):
        self.takes += 1
        self._work()
        while not self.finished:
            left = [self.lengths.of(one) - one.begun - self.done[ticket] for ticket, one in self.requests[: self.slots]]
            self.wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wake.wait(), PER_TOKEN * min(left) if left else None)
            self._work()
        if self.takes in self.deaths:
            self.dead = True
            raise ActorLost("dead", "the actor died")
        finished, self.finished = self.finished, []
        return finished

    def _work(self) -> None:
        """Account for the time since the last call."""
        now = asyncio.get_running_loop().time()
        tokens, self.worked = round((now - self.worked) / PER_TOKEN), now
        for ticket, request in self.requests[: self.slots]:
            self.done[ticket] += tokens
            if request.begun + self.done[ticket] >= self.lengths.of(request):
                self.finished.append((ticket, self._completion(request, self.done.pop(ticket))))
        self.requests = [one for one in self.requests if one[0] in self.done]

    def _completion(self, request: Request, count: int, *, interrupted: bool = False) -> Completion:
        tokens = np.arange(request.begun, request.begun + count)
        return Completion(tokens, np.full(count, -1.0, dtype=np.float32), False, self.version, interrupted)

    async def check(self) -> int:
        raise ActorLost("dead", "dead")

    async def activity(self) -> str:
        return ""

    def kill(self) -> None: ...


@dataclass
class Scorers:
    """Score a response by its length: whether it is odd, or as `reward` does."""

    reward: Callable[[int], float] = lambda length: float(length % 2)
    per = "response"

    def score(self, requests, scored):
        for index, request in enumerate(requests):
            scored(index, Score(self.reward(len(request.response_ids)), text=""))


class Switch:
    """One engine, which is replaced where it died as it was interrupted, or on a device of its own during training."""

    weights = ""

    client: RolloutClient
    revive: Callable[[int], Engine | None]

    def __init__(self, engines: list[Engine]) -> None:
        self.engines, self.training, self.pause = engines, False, lambda: None

    def to_rollout(self, version):
        self.pause()
        self.training = False
        if self.engines[0].dead:
            self.client.replace(0, required(self.revive(0)))
        self.engines[0].version, self.weights = version, f"weights {version}"

    def to_training(self):
        self.training = True


class PacedThread(LoopThread):
    """Time passes only while the driver waits for a coroutine: what overlaps with training takes as long as `train`."""

    def run(self, coroutine):
        loop = self.loop
        assert isinstance(loop, VirtualTime)

        async def paced():
            loop.stands = False
            try:
                return await coroutine
            finally:
                loop.stands = True

        return super().run(paced())


def train(experience: AsynchronousExperience, seconds: float) -> None:
    """Let time pass as a step trains."""
    required(experience.thread).run(asyncio.sleep(seconds))


def build(
    lengths: LengthLaw,
    *,
    kind: type[AsynchronousExperience] = AsynchronousExperience,
    scorers: Scorers | None = None,
    bound=2,
    batch=2,
    most=None,
    slots=100,
    samples=1,
    deaths=frozenset(),
    prompts=None,
    group_filter=None,
    store=None,
    **more,
) -> AsynchronousExperience:
    engine = Engine(lengths, slots, deaths)
    engines = [engine]

    def revive(index: int) -> Engine | None:
        if switch.training and more.get("overlaps"):
            return None
        engines[0] = again = Engine(lengths, slots)
        again.version = engine.version
        return again

    client = RolloutClient(engines, revive, capacity=10**6, timeout=1e9, retries=100)
    switch = Switch(engines)
    switch.client, switch.revive = client, revive
    rows = [Prompt(row, [row, 1], "?", "maths", "42", {}) for row in range(7)]
    made = kind(
        switch,
        rows,
        PromptOrder(len(rows), 0, False),
        EpisodeRunner(client, scorers or Scorers(), 1),
        FaultGuard("exclude", 1.0, 99),
        SamplingPlan(
            batch,
            samples,
            Sampling(max_tokens=10**6, stop_ids=(0,)),
            group_filter,
            prompts_in_all=sys.maxsize if prompts is None else prompts,
        ),
        store or ResponseStore(carries=True),
        bound=bound,
        most=most or batch * (bound + 1),
        slots=slots,
        **more,
    )
    made.thread = (PacedThread if made.overlaps else LoopThread)(VirtualTime())
    if made.overlaps:
        switch.pause = made.pause
    return made

"""Jobs in flight on actors: sent, fetched as they finish, and retried on another actor if theirs is lost.

Each actor has a lane. New jobs are sent in one call per turn of the event loop, and a pump fetches results as long as
the actor has jobs. A subclass of `Dispatcher` defines the jobs, assigns them to lanes, and handles the loss of an
actor.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from threading import get_ident
from typing import Any, Generic, TypeVar

COALESCE_SECONDS = 0.002  # a value from another thread waits so long for others: waking a loop costs more than a value


class ActorLost(RuntimeError):
    """An actor died or does not respond; `cause` is the reason in one line, `kind` how it is counted."""

    def __init__(self, message: str, cause: str = "", kind: str = "died") -> None:
        super().__init__(message)
        self.cause, self.kind = cause or message, kind


@dataclass(eq=False)
class ActorJob:
    """Work for one actor, named by its ticket, with the future that its caller awaits. `attempts` counts the actors
    that were lost with it."""

    ticket: int
    future: asyncio.Future
    attempts: int = field(default=0, init=False)


J = TypeVar("J", bound=ActorJob)
T = TypeVar("T")


@dataclass(eq=False)
class Lane(Generic[J]):
    """One actor, its unfinished `jobs` by ticket, and the `queued` ones among them, which are sent next."""

    index: int
    actor: Any
    jobs: dict[int, J] = field(default_factory=dict, init=False)
    queued: list[J] = field(default_factory=list, init=False)
    pump: asyncio.Task | None = field(default=None, init=False)

    @property
    def due(self) -> bool:
        """Whether there are jobs to send."""
        return bool(self.queued)


L = TypeVar("L", bound=Lane)


class Dispatcher(ABC, Generic[J, L]):
    """Jobs of one event loop at a time on the actors of `lanes`, which are checked every `look_seconds`."""

    look_seconds = 2.0

    def __init__(self, lanes: Iterable[L]) -> None:
        self.lanes = list(lanes)
        self.waiting: deque[J] = deque()  # jobs without a lane
        self.tickets = count()
        self.error: Exception | None = None  # the last error that ended all jobs in flight
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flush_due = False
        self._watch_task: asyncio.Task | None = None

    @abstractmethod
    def assign(self) -> None:
        """Give waiting jobs to lanes, by `give`."""

    @abstractmethod
    def send(self, lane: L) -> None:
        """Send an actor the new jobs of its lane."""

    @abstractmethod
    async def take(self, lane: L) -> Sequence[tuple[int, Any]]:
        """Wait for results of an actor, by ticket. Raises ActorLost."""

    @abstractmethod
    def receive(self, lane: L, results: Sequence[tuple[int, Any]]) -> None:
        """Resolve the jobs that have results; some may be of jobs that were abandoned."""

    @abstractmethod
    async def lost(self, lane: L, failure: ActorLost) -> None:
        """Replace the actor of a lane, and decide which of its jobs are retried. An error raised here ends all jobs."""

    @abstractmethod
    async def look(self) -> None:
        """Report slow actors; called every `look_seconds` while jobs are in flight. Its errors end all jobs."""

    @property
    def load(self) -> int:
        """The number of unfinished jobs."""
        return len(self.waiting) + sum(len(lane.jobs) for lane in self.lanes)

    def submit(self, jobs: Iterable[J]) -> None:
        """Start jobs, in the event loop of those in flight."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # unfinished jobs of an earlier loop have no callers any more
            self._loop, self._flush_due, self._watch_task = loop, False, None
            self.waiting.clear()
            for lane in self.lanes:
                lane.jobs, lane.queued, lane.pump = {}, [], None
        self.waiting.extend(jobs)
        self.flush_soon()

    def flush_soon(self) -> None:
        if not self._flush_due:  # once for all jobs submitted in this turn of the loop
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Assign waiting jobs, and send each actor its new ones."""
        self._flush_due = False
        self.assign()
        for lane in self.lanes:
            if lane.due:
                self.send(lane)
                lane.queued = []
                if lane.pump is None:
                    lane.pump = asyncio.create_task(self._pump(lane))
        if (self._watch_task is None or self._watch_task.done()) and any(lane.pump for lane in self.lanes):
            self._watch_task = asyncio.create_task(self._watch())

    def give(self, lane: L, job: J) -> None:
        lane.jobs[job.ticket] = job
        lane.queued.append(job)

    async def drained(self) -> None:
        """Wait until no actor has a job. Raises the error that ended the jobs in flight, if one did."""
        pumps = (lane.pump for lane in self.lanes if lane.pump is not None)
        for ended in await asyncio.gather(*pumps, return_exceptions=True):
            if isinstance(ended, asyncio.CancelledError):  # by `fail`
                raise self.error or ended

    def fail(self, error: Exception) -> None:
        """End every job in flight with the error."""
        self.error = error
        jobs = [*self.waiting, *(job for lane in self.lanes for job in lane.jobs.values())]
        self.waiting.clear()
        for lane in self.lanes:
            lane.jobs, lane.queued = {}, []
        self.stop({asyncio.current_task()})
        for job in jobs:
            if not job.future.done():
                job.future.set_exception(error)
                job.future.exception()  # counts as retrieved: one caller's report is enough

    def stop(self, but: Iterable[asyncio.Task | None] = ()) -> None:
        """Stop fetching results."""
        for task in (*(lane.pump for lane in self.lanes), self._watch_task):
            if task is not None and task not in but:
                task.cancel()

    async def _pump(self, lane: L) -> None:
        try:
            with self._ending_all():
                while lane.jobs:
                    try:
                        results = await self.take(lane)
                    except ActorLost as failure:
                        await self.lost(lane, failure)
                    else:
                        self.receive(lane, results)
        finally:
            lane.pump, lane.jobs = None, {}

    async def _watch(self) -> None:
        with self._ending_all():
            while any(lane.pump for lane in self.lanes):
                await asyncio.sleep(self.look_seconds)
                await self.look()

    @contextmanager
    def _ending_all(self) -> Iterator[None]:
        """Any error in the block ends the jobs of all callers."""
        try:
            yield
        except Exception as error:
            self.fail(error)


class Arrivals(Generic[T]):
    """Values for one event loop, from any thread, in lists: those that arrive together come in one."""

    def __init__(self) -> None:
        self._loop, self._due, self._arrived = asyncio.get_running_loop(), asyncio.Event(), deque[T]()
        self._thread, self._woken = get_ident(), False

    def put(self, value: T) -> None:
        self._arrived.append(value)
        if self._woken:
            return
        self._woken = True
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            if get_ident() == self._thread:
                self._due.set()
            else:
                self._loop.call_soon_threadsafe(self._loop.call_later, COALESCE_SECONDS, self._due.set)

    async def take(self) -> list[T]:
        """Wait for values, and return all that have arrived; rarely none."""
        await self._due.wait()
        self._due.clear()
        self._woken = False  # before they are taken: a value that arrives meanwhile wakes the loop again
        return [self._arrived.popleft() for _ in range(len(self._arrived))]


async def in_lists(futures: Iterable[asyncio.Future]) -> AsyncIterator[list[tuple[int, asyncio.Future]]]:
    """Yield futures with their indices as they finish; futures that finish together come in one list."""
    finished: asyncio.Queue[tuple[int, asyncio.Future]] = asyncio.Queue()
    missing = 0
    for missing, future in enumerate(futures, start=1):
        future.add_done_callback(lambda future, index=missing - 1: finished.put_nowait((index, future)))
    while missing:
        arrived = [await finished.get()]
        while not finished.empty():
            arrived.append(finished.get_nowait())
        missing -= len(arrived)
        yield arrived

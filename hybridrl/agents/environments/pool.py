"""The driver's side of episodes: gives them to processes, has their turns sampled, and returns them as they end.

A process that dies or stops responding is replaced, and its episodes are started again; those in whose environment the
process was when it died are tried twice, then excluded by name.
"""

import asyncio
import os
import pickle
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Self

from ray.exceptions import RayError, RayTaskError

from hybridrl.agents.environments.worker import (
    CHECK,
    HEARTBEAT_SECONDS,
    Answer,
    EpisodeSettings,
    EpisodeSpec,
    EpisodeWorker,
    Given,
    Ticket,
)
from hybridrl.core.cluster import Actor, Pending, RaySession, cause, gather, kill, spawn
from hybridrl.core.cluster.failures import root
from hybridrl.core.cluster.group import START_LIMIT
from hybridrl.core.experience.trajectory import Trajectory
from hybridrl.core.rollout import Completion, Request, RequestFault
from hybridrl.tracking.console import info, warn

TRIES = 2  # of an episode in whose environment its process died
SILENT_SECONDS = 60.0  # without the end of an episode, after which it is said what they wait for
GRACE_SECONDS = 60.0  # without a heartbeat, in addition to the time limit of an environment: one starts in less

Sampler = Callable[[Request], "asyncio.Future[Completion]"]


class EpisodeWorkers:
    """All processes that run episodes, spread over the machines of a session."""

    def __init__(self, session: RaySession, settings: EpisodeSettings, count: int, logs: Sequence[str]) -> None:
        self.session, self.settings, self.logs = session, settings, logs
        self.actors = [self._spawn(index) for index in range(count)]
        self.replacing = threading.Lock()  # calls run in event loops of several threads
        self.limit = settings.limits.call_timeout + HEARTBEAT_SECONDS + GRACE_SECONDS
        self.start_limit = 0.0
        self.starting: set[Actor] = set()  # of those that replace others

    def __len__(self) -> int:
        return len(self.actors)

    def wait_until_ready(self, timeout: float) -> None:
        self.start_limit = timeout
        calls = [actor.start.remote() for actor in self.actors]
        gather(calls, "episode worker.start", timeout, self.logs, key=START_LIMIT)

    def replacement(self, index: int, lost: Actor) -> Actor:
        """Return a process in place of one that died or does not respond; only the first call that lost it starts
        one."""
        with self.replacing:
            if self.actors[index] is lost:
                kill(lost)
                self.actors[index] = self._spawn(index)
                self.starting.add(self.actors[index])
            return self.actors[index]

    def limit_of(self, actor: Actor) -> float:
        """Return the seconds within which a process responds; one that replaces another has to start first."""
        return self.limit + self.start_limit * (actor in self.starting)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self.actors:
            kill(actor)

    def _spawn(self, index: int) -> Actor:
        machines, options = self.session.first_devices, {"max_concurrency": 1000}
        return spawn(
            EpisodeWorker, self.session, machines[index % len(machines)], {}, self.logs[index], self.settings, **options
        )


@dataclass(eq=False)
class Running:
    """An episode under way, which waits for its environment unless it has `asked` for a turn."""

    spec: EpisodeSpec
    sample: Sampler
    ended: asyncio.Future[Trajectory]
    asked: Request | None = None
    turn: asyncio.Future[Completion] | None = None  # once it is requested
    deaths: int = 0


@dataclass(eq=False)
class WorkerLane:
    """One process, and the episodes that it has; `new` and `turns` are what it is given next."""

    index: int
    actor: Actor
    episodes: dict[Ticket, Running] = field(default_factory=dict)
    new: list[Ticket] = field(default_factory=list)
    turns: list[tuple[Ticket, Answer]] = field(default_factory=list)
    due: bool = False
    pump: asyncio.Task | None = None  # serves its episodes until all have ended

    def thinking(self) -> list[Ticket]:
        """The episodes that wait for their environment."""
        return [ticket for ticket, episode in self.episodes.items() if episode.asked is None]


async def _well() -> str:
    return ""


class EpisodeDispatch:
    """Runs episodes in the processes, which may be started at any time, all in one event loop, until it is closed.

    With `together` turns are requested once every episode that runs wants one, so that engines form the same batches
    every time. `held` returns whether turns wait for the devices, so that no episode may end for long, and `check` why
    none can be sampled, if so.
    """

    def __init__(
        self,
        workers: EpisodeWorkers,
        *,
        together: bool = False,
        held: Callable[[], bool] = lambda: False,
        check: Callable[[], Awaitable[str]] = _well,
    ) -> None:
        self.workers, self.together, self.held, self.check = workers, together, held, check
        self.call = os.urandom(8).hex()  # names it, as the processes have episodes of others too
        self.lanes = [WorkerLane(index, actor) for index, actor in enumerate(workers.actors)]
        self.tickets = count()
        self.sending: set[asyncio.Task] = set()
        self.error: Exception | None = None
        self.moved = 0.0  # when an episode ended last, or the silence was reported

    def start(self, specs: Sequence[EpisodeSpec], sample: Sampler) -> list[asyncio.Future[Trajectory]]:
        """Start episodes, whose turns `sample` has sampled; return their ends, in order."""
        if self.error is not None:
            raise self.error
        loop = asyncio.get_running_loop()
        self.moved = loop.time()
        started = [Running(spec, sample, loop.create_future()) for spec in specs]
        for episode in started:
            lane = min(self.lanes, key=lambda lane: len(lane.episodes))
            if lane.pump is None:
                lane.actor = self.workers.actors[lane.index]  # another dispatch may have replaced it
                lane.pump = asyncio.create_task(self._pump(lane))
            ticket = next(self.tickets)
            lane.episodes[ticket] = episode
            lane.new.append(ticket)
            self._give_soon(lane)
        return [episode.ended for episode in started]

    async def run(self, specs: Sequence[EpisodeSpec], sample: Sampler) -> AsyncIterator[list[tuple[int, Trajectory]]]:
        """Yield episodes with their indices as they end; those that end together come in one list."""
        ended: asyncio.Queue[tuple[int, asyncio.Future[Trajectory]]] = asyncio.Queue()
        for index, future in enumerate(self.start(specs, sample)):
            future.add_done_callback(lambda future, index=index: ended.put_nowait((index, future)))
        missing = len(specs)
        while missing:
            arrived = [await self._next(ended)]
            while not ended.empty():
                arrived.append(ended.get_nowait())
            missing -= len(arrived)
            yield [(index, future.result()) for index, future in arrived]

    def close(self) -> None:
        """Abandon what has not ended."""
        for lane in self.lanes:
            if lane.pump is not None:
                lane.pump.cancel()
            for episode in lane.episodes.values():
                _drop_turn(episode)
            lane.actor.end.remote(self.call)
        for task in self.sending:
            task.cancel()

    async def _next(self, ended: asyncio.Queue) -> tuple[int, asyncio.Future[Trajectory]]:
        """Wait for what ends next, and say now and then what the others wait for."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                return await asyncio.wait_for(ended.get(), max(self.moved + SILENT_SECONDS - loop.time(), 0.01))
            except TimeoutError:
                if loop.time() < self.moved + SILENT_SECONDS:
                    continue  # another has ended since, or it was said
                self.moved = loop.time()
                if self.held():
                    continue
                running = sum(len(lane.episodes) for lane in self.lanes)
                thinking = sum(len(lane.thinking()) for lane in self.lanes)
                info(
                    f"no episode has ended for {SILENT_SECONDS:g} s: of {running}, {thinking} wait for an environment "
                    "or agent, the others for the policy"
                )

    async def _pump(self, lane: WorkerLane) -> None:
        """Serve a process's episodes until all have ended."""
        try:
            while lane.episodes:
                try:
                    content = await self._result(lane.actor, lane.actor.take.remote(self.call))
                except (RayError, TimeoutError) as error:
                    self._lost(lane, error)
                    continue
                for ticket, what in pickle.loads(content):
                    if ticket == CHECK:
                        self._keep(self._check(lane))
                    elif isinstance(what, Request):
                        self._ask(lane, ticket, what)
                    else:
                        self._end(lane, ticket, what)
                if self.together:
                    self._request_together()
        except Exception as error:
            self._fail(error)
        finally:
            lane.pump = None

    def _ask(self, lane: WorkerLane, ticket: Ticket, request: Request) -> None:
        lane.episodes[ticket].asked = request
        if not self.together:
            self._request(lane, ticket)

    def _request_together(self) -> None:
        """Request the turns that episodes ask for once none is in its environment."""
        if not any(lane.thinking() for lane in self.lanes):
            waiting = ((ticket, lane) for lane in self.lanes for ticket, one in lane.episodes.items() if not one.turn)
            for ticket, lane in sorted(waiting, key=lambda item: item[0]):
                self._request(lane, ticket)

    def _request(self, lane: WorkerLane, ticket: Ticket) -> None:
        episode = lane.episodes[ticket]
        episode.turn = episode.sample(episode.asked)
        episode.turn.add_done_callback(partial(self._sampled, lane, ticket, episode))

    def _sampled(self, lane: WorkerLane, ticket: Ticket, episode: Running, turn: asyncio.Future[Completion]) -> None:
        if turn.cancelled() or episode.turn is not turn:  # of an episode that was started again
            return
        error = turn.exception()
        if error and not isinstance(error, RequestFault):
            self._fail(error)
            return
        episode.asked = episode.turn = None
        lane.turns.append((ticket, error or turn.result()))
        self._give_soon(lane)

    def _give_soon(self, lane: WorkerLane) -> None:
        if not lane.due:  # once for all that comes in this turn of the loop
            lane.due = True
            asyncio.get_running_loop().call_soon(self._give, lane)

    def _give(self, lane: WorkerLane) -> None:
        given: Given = [(ticket, lane.episodes[ticket].spec) for ticket in lane.new], lane.turns
        lane.new, lane.turns, lane.due = [], [], False
        self._keep(self._send(lane.actor, pickle.dumps(given, pickle.HIGHEST_PROTOCOL)))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task, which ends with this at the latest."""
        task = asyncio.create_task(work)
        self.sending.add(task)
        task.add_done_callback(self.sending.discard)

    async def _check(self, lane: WorkerLane) -> None:
        lane.turns.append((CHECK, await self.check()))
        self._give_soon(lane)

    async def _send(self, actor: Actor, content: bytes) -> None:
        """Give a process its episodes and turns. If it has died, or does not respond, the pump finds that out."""
        try:
            await self._result(actor, actor.give.remote(self.call, content))
        except (RayError, TimeoutError):
            pass
        except Exception as error:
            self._fail(error)

    def _end(self, lane: WorkerLane, ticket: Ticket, trajectory: Trajectory) -> None:
        self.moved = asyncio.get_running_loop().time()
        episode = lane.episodes.pop(ticket)
        _drop_turn(episode)
        if not episode.ended.done():
            episode.ended.set_result(trajectory)

    def _lost(self, lane: WorkerLane, error: Exception) -> None:
        """Replace a process and start its episodes again, but for those that have ended it too often."""
        log = self.workers.logs[lane.index]
        silent = isinstance(error, TimeoutError)
        limit = self.workers.limit_of(lane.actor)
        reason = f"did not respond for {limit:g} s" if silent else f"died: {cause(error)}"
        suspects = lane.thinking()
        for ticket in suspects:
            lane.episodes[ticket].deaths += 1
            if lane.episodes[ticket].deaths >= TRIES:
                detail = f"the process of its environment {reason}; see {log}"
                self._end(lane, ticket, Trajectory([], "fault", fault="died", detail=detail))
        warn(
            f"episode worker {lane.index} {reason}; starting its {len(lane.episodes)} episodes again, of which "
            f"{len(suspects)} were in their environment; its log: {log}",
            "episode-worker-lost",
        )
        lane.actor = self.workers.replacement(lane.index, lane.actor)
        for episode in lane.episodes.values():
            _drop_turn(episode)
        lane.new, lane.turns = sorted(lane.episodes), []
        self._give_soon(lane)

    def _fail(self, error: Exception) -> None:
        """End all episodes with the error."""
        self.error = self.error or error
        for lane in self.lanes:
            for episode in lane.episodes.values():
                if not episode.ended.done():
                    episode.ended.set_exception(error)
                    episode.ended.exception()  # counts as retrieved: one caller's report is enough

    async def _result(self, actor: Actor, ref: Pending) -> Any:
        """Return the result of a remote call within the time limit of the process."""
        try:
            result = await asyncio.wait_for(ref, self.workers.limit_of(actor))
            self.workers.starting.discard(actor)
            return result
        except RayError as error:
            if isinstance(root(error), RayTaskError):
                raise RuntimeError(f"an episode worker failed: {cause(error)}") from error
            raise root(error) from None


def _drop_turn(episode: Running) -> None:
    """Have the turn sampled no further that an episode waits for."""
    turn, episode.asked, episode.turn = episode.turn, None, None
    if turn is not None:
        turn.cancel()

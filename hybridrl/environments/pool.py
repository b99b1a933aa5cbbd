"""The driver's side of episodes: gives them to processes, has their turns sampled, and returns them as they end.

A process that dies or stops responding is replaced, and its episodes are started again; those in whose environment the
process was when it died are tried twice, then excluded by name.
"""

import asyncio
import os
import pickle
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from ray.exceptions import RayActorError, RayTaskError

from hybridrl.cluster import Actor, Pending, RaySession, cause, gather, kill, spawn
from hybridrl.cluster.group import START_LIMIT
from hybridrl.environments.episode import Trajectory
from hybridrl.environments.worker import HEARTBEAT_SECONDS, EpisodeSettings, EpisodeSpec, EpisodeWorker, Ticket
from hybridrl.rollout import Completion, Request
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
        self.limit = settings.limits.call_timeout + HEARTBEAT_SECONDS + GRACE_SECONDS

    def __len__(self) -> int:
        return len(self.actors)

    def wait_until_ready(self, timeout: float) -> None:
        calls = [actor.start.remote() for actor in self.actors]
        gather(calls, "episode worker.start", timeout, self.logs, key=START_LIMIT)

    def replace(self, index: int) -> None:
        """Start a process in place of one that died or does not respond."""
        kill(self.actors[index])
        self.actors[index] = self._spawn(index)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self.actors:
            kill(actor)

    def _spawn(self, index: int) -> Actor:
        machines, per_machine = len(self.session.groups), self.session.per_machine
        rank = index % machines * per_machine
        options = {"max_concurrency": 1000}
        return spawn(EpisodeWorker, self.session, rank, {}, self.logs[index], self.settings, **options)


@dataclass(eq=False)
class Lane:
    """One process in a run of episodes. `thinking` are the episodes that wait for their environment."""

    index: int
    tickets: set[Ticket] = field(default_factory=set)
    thinking: set[Ticket] = field(default_factory=set)
    answers: list[tuple[Ticket, Completion]] = field(default_factory=list)
    pump: asyncio.Task | None = None
    begun: bool = False
    starts: int = 0  # of the process: what an earlier one asked for is ignored


class EpisodeDispatch:
    """One call's episodes. `sample` has a turn sampled; with `together` turns are requested once every episode that
    runs wants one, so that engines form the same batches every time."""

    def __init__(
        self, workers: EpisodeWorkers, specs: Sequence[EpisodeSpec], sample: Sampler, *, together: bool
    ) -> None:
        self.workers, self.specs, self.sample, self.together = workers, specs, sample, together
        self.lanes = [Lane(index) for index in range(len(workers))]
        self.call = os.urandom(8).hex()  # names it, so that nothing of an earlier call is taken for its own
        self.deaths: Counter[Ticket] = Counter()
        self.sending: set[asyncio.Task] = set()
        self.held: list[tuple[Lane, Ticket, Request]] = []
        self.ended: asyncio.Queue[tuple[Ticket, Trajectory] | Exception] = asyncio.Queue()

    async def run(self) -> AsyncIterator[list[tuple[int, Trajectory]]]:
        """Yield episodes with their indices as they end; those that end together come in one list."""
        for ticket in range(len(self.specs)):
            self.lanes[ticket % len(self.lanes)].tickets.add(ticket)
        try:
            for lane in self.lanes:
                lane.pump = asyncio.create_task(self._pump(lane))
            missing = len(self.specs)
            while missing:
                arrived = [await self._next()]
                while not self.ended.empty():
                    arrived.append(self.ended.get_nowait())
                for one in arrived:
                    if isinstance(one, Exception):
                        raise one
                missing -= len(arrived)
                yield arrived
        finally:
            for task in (*(lane.pump for lane in self.lanes), *self.sending):
                task.cancel()

    async def _next(self) -> tuple[Ticket, Trajectory] | Exception:
        """Wait for what ends next, and say now and then what the others wait for."""
        while True:
            try:
                return await asyncio.wait_for(self.ended.get(), SILENT_SECONDS)
            except TimeoutError:
                running = sum(len(lane.tickets) for lane in self.lanes)
                thinking = sum(len(lane.thinking) for lane in self.lanes)
                info(
                    f"no episode has ended for {SILENT_SECONDS:g} s: of {running}, {thinking} wait for an environment "
                    "or agent, the others for the policy"
                )

    async def _pump(self, lane: Lane) -> None:
        """Start a process's episodes and serve them until all have ended."""
        try:
            while lane.tickets:
                try:
                    if not lane.begun:
                        await self._begin(lane)
                    content = await self._result(self.workers.actors[lane.index].take.remote(self.call))
                except (RayActorError, TimeoutError) as error:
                    self._lost(lane, error)
                    continue
                for ticket, what in pickle.loads(content):
                    lane.thinking.discard(ticket)
                    if isinstance(what, Request):
                        self._ask(lane, ticket, what)
                    else:
                        lane.tickets.discard(ticket)
                        self.ended.put_nowait((ticket, what))
                self._release()
        except Exception as error:
            self.ended.put_nowait(error)

    async def _begin(self, lane: Lane) -> None:
        """Start a process's episodes; one that was just replaced has to start itself first."""
        lane.begun, lane.thinking, lane.answers = True, set(lane.tickets), []
        lane.starts += 1
        content = pickle.dumps([(one, self.specs[one]) for one in sorted(lane.tickets)], pickle.HIGHEST_PROTOCOL)
        await self._result(self.workers.actors[lane.index].begin.remote(self.call, content))

    def _ask(self, lane: Lane, ticket: Ticket, request: Request) -> None:
        if self.together:
            self.held.append((lane, ticket, request))
        else:
            self.sample(request).add_done_callback(partial(self._answered, lane, ticket, lane.starts))

    def _release(self) -> None:
        """Request the turns that are held once no episode is in its environment."""
        if self.held and not any(lane.thinking for lane in self.lanes):
            held, self.held = sorted(self.held, key=lambda item: item[1]), []
            for lane, ticket, request in held:
                self.sample(request).add_done_callback(partial(self._answered, lane, ticket, lane.starts))

    def _answered(self, lane: Lane, ticket: Ticket, starts: int, future: asyncio.Future[Completion]) -> None:
        if future.cancelled() or starts != lane.starts:
            return
        if error := future.exception():
            self.ended.put_nowait(error)
            return
        if not lane.answers:  # once for all turns that are sampled in this turn of the loop
            asyncio.get_running_loop().call_soon(self._flush, lane)
        lane.answers.append((ticket, future.result()))
        lane.thinking.add(ticket)

    def _flush(self, lane: Lane) -> None:
        if answers := lane.answers:
            lane.answers = []
            task = asyncio.create_task(self._send(lane, answers))
            self.sending.add(task)
            task.add_done_callback(self.sending.discard)

    async def _send(self, lane: Lane, answers: list[tuple[Ticket, Completion]]) -> None:
        """Give a process its turns. If it has died, or does not respond, the pump finds that out."""
        try:
            content = pickle.dumps(answers, pickle.HIGHEST_PROTOCOL)
            await self._result(self.workers.actors[lane.index].answer.remote(content))
        except (RayActorError, TimeoutError):
            pass
        except Exception as error:
            self.ended.put_nowait(error)

    def _lost(self, lane: Lane, error: Exception) -> None:
        """Replace a process and start its episodes again, but for those that have ended it too often."""
        log = self.workers.logs[lane.index]
        silent = isinstance(error, TimeoutError)
        reason = f"did not respond for {self.workers.limit:g} s" if silent else f"died: {cause(error)}"
        suspects = sorted(lane.thinking)
        for ticket in suspects:
            self.deaths[ticket] += 1
            if self.deaths[ticket] >= TRIES:
                lane.tickets.discard(ticket)
                detail = f"the process of its environment {reason}; see {log}"
                self.ended.put_nowait((ticket, Trajectory([], "fault", fault="died", detail=detail)))
        self.held = [item for item in self.held if item[0] is not lane]
        warn(
            f"episode worker {lane.index} {reason}; starting its {len(lane.tickets)} episodes again, of which "
            f"{len(suspects)} were in their environment; its log: {log}",
            "episode-worker-lost",
        )
        self.workers.replace(lane.index)
        lane.begun = False

    async def _result(self, ref: Pending) -> Any:
        """Return the result of a remote call within the time limit of a process that responds."""
        try:
            return await asyncio.wait_for(ref, self.workers.limit)
        except RayTaskError as error:
            raise RuntimeError(f"an episode worker failed: {cause(error)}") from error

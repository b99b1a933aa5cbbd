"""The driver's side of episodes: gives them to processes, has their turns sampled, and returns them as they end.

A process that dies or stops responding is replaced, and its episodes are started again; those in whose environment the
process was when it died are tried twice, then excluded by name.
"""

import asyncio
import os
import pickle
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from ray.exceptions import RayError, RayTaskError

from hybridrl.agents.environments.worker import (
    CHECK,
    HEARTBEAT_SECONDS,
    Answer,
    EpisodeSettings,
    EpisodeSpec,
    EpisodeTicket,
    EpisodeWorker,
    Given,
    Taken,
)
from hybridrl.core.cluster import Actor, Pending, RaySession, cause, gather, kill, spawn
from hybridrl.core.cluster.dispatch import ActorJob, ActorLost, Dispatcher, Lane, in_lists
from hybridrl.core.cluster.failures import root
from hybridrl.core.cluster.group import START_LIMIT
from hybridrl.core.experience.trajectory import Trajectory
from hybridrl.core.pictures import Picture, PictureStore
from hybridrl.core.rollout import Completion, Request, RequestFault
from hybridrl.tracking.console import info, warn

TRIES = 2  # per episode, if its process dies in its environment
SILENT_SECONDS = 60.0  # without the end of an episode, until a report of what they wait for
GRACE_SECONDS = 60.0  # without a heartbeat, in addition to the time limit of an environment: one starts in less

SampleTurn = Callable[[Request], "asyncio.Future[Completion]"]


class EpisodeWorkers:
    """All processes that run episodes, spread over the machines of a session."""

    def __init__(self, session: RaySession, settings: EpisodeSettings, logs: Sequence[str]) -> None:
        self.session, self.settings, self.logs = session, settings, logs
        self.actors = [self._spawn(index) for index in range(len(logs))]
        self.replacing = threading.Lock()  # calls run in event loops of several threads
        self.limit = settings.limits.call_timeout + HEARTBEAT_SECONDS + GRACE_SECONDS
        self.start_limit = 0.0
        self.starting: set[Actor] = set()  # replacements that have not responded yet

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
class RunningEpisode(ActorJob):
    """An episode in flight, which waits for its environment unless it has `asked` for a turn."""

    spec: EpisodeSpec
    sample: SampleTurn
    pictures: dict[int, Picture] = field(default_factory=dict, init=False)  # of its turns, while they are in use
    asked: Request | None = field(default=None, init=False)
    turn: asyncio.Future[Completion] | None = field(default=None, init=False)  # once it is requested

    def drop_turn(self) -> None:
        """Cancel the turn that the episode is waiting for."""
        turn, self.asked, self.turn = self.turn, None, None
        if turn is not None:
            turn.cancel()


@dataclass(eq=False)
class WorkerLane(Lane[RunningEpisode]):
    """One process, and its episodes; `turns` are sent next."""

    turns: list[tuple[EpisodeTicket, Answer]] = field(default_factory=list, init=False)

    @property
    def due(self) -> bool:
        return bool(self.queued or self.turns)

    def thinking(self) -> list[RunningEpisode]:
        """The episodes that wait for their environment."""
        return [episode for episode in self.jobs.values() if episode.asked is None]


async def _no_ailment() -> str:
    return ""


class EpisodeDispatch(Dispatcher[RunningEpisode, WorkerLane]):
    """Runs episodes in the processes, which may be started at any time, all in one event loop, until it is closed.

    With `together` turns are requested once every running episode wants one: then engines form the same batches every
    time. `paused` returns whether turns wait for the devices, in which case no episode may end for long; `check`
    returns why none can be sampled, or "". The pixels that episodes send go to the `store`.
    """

    def __init__(
        self,
        workers: EpisodeWorkers,
        *,
        together: bool = False,
        paused: Callable[[], bool] = lambda: False,
        check: Callable[[], Awaitable[str]] = _no_ailment,
        store: PictureStore | None = None,
    ) -> None:
        super().__init__(WorkerLane(index, actor) for index, actor in enumerate(workers.actors))
        self.workers, self.together, self.paused, self.check = workers, together, paused, check
        self.store = store or PictureStore()
        self.call = os.urandom(8).hex()  # names it, as the processes have episodes of others too
        self.tasks: set[asyncio.Task] = set()
        self.moved = 0.0  # when an episode ended last, or the silence was reported

    def start(self, specs: Sequence[EpisodeSpec], sample: SampleTurn) -> list[asyncio.Future[Trajectory]]:
        """Start episodes, whose turns `sample` has sampled; return their ends, in order."""
        if self.error is not None:
            raise self.error
        loop = asyncio.get_running_loop()
        self.moved = loop.time()
        episodes = [RunningEpisode(next(self.tickets), loop.create_future(), spec, sample) for spec in specs]
        self.submit(episodes)
        return [episode.future for episode in episodes]

    async def run(
        self, specs: Sequence[EpisodeSpec], sample: SampleTurn
    ) -> AsyncIterator[list[tuple[int, Trajectory]]]:
        """Yield episodes with their indices as they end; those that end together come in one list."""
        async for ended in in_lists(self.start(specs, sample)):
            yield [(index, future.result()) for index, future in ended]

    def close(self) -> None:
        """Abandon what has not ended."""
        self.stop()
        for lane in self.lanes:
            for episode in lane.jobs.values():
                episode.drop_turn()
            lane.actor.end.remote(self.call)
        for task in self.tasks:
            task.cancel()

    def assign(self) -> None:
        while self.waiting:
            lane = min(self.lanes, key=lambda lane: len(lane.jobs))
            if lane.pump is None:
                lane.actor = self.workers.actors[lane.index]  # another dispatch may have replaced it
            self.give(lane, self.waiting.popleft())

    def send(self, lane: WorkerLane) -> None:
        content: Given = [(episode.ticket, episode.spec) for episode in lane.queued], lane.turns
        lane.turns = []
        self._keep(self._give(lane.actor, pickle.dumps(content, pickle.HIGHEST_PROTOCOL)))

    async def _give(self, actor: Actor, content: bytes) -> None:
        """Give a process its episodes and turns."""
        try:
            await self._result(actor, actor.give.remote(self.call, content))
        except ActorLost:
            pass  # the pump finds that out
        except RuntimeError as error:
            self.fail(error)

    async def take(self, lane: WorkerLane) -> Sequence[tuple[EpisodeTicket, Taken]]:
        return pickle.loads(await self._result(lane.actor, lane.actor.take.remote(self.call)))

    def receive(self, lane: WorkerLane, results: Sequence[tuple[EpisodeTicket, Taken]]) -> None:
        for ticket, result in results:
            if ticket == CHECK:
                self._keep(self._check(lane))
            elif isinstance(result, list):
                stored = [self.store.add(each.pixels, each.tokens, each.preview) for each in result]
                lane.jobs[ticket].pictures |= {picture.digest: picture for picture in stored}
            elif isinstance(result, Request):
                lane.jobs[ticket].asked = result
                if not self.together:
                    self._request(lane, lane.jobs[ticket])
            else:
                self._end(lane, ticket, result)
        # Once no episode is in its environment, all turns that they ask for are requested.
        if self.together and not any(lane.thinking() for lane in self.lanes):
            asking = ((job.ticket, lane, job) for lane in self.lanes for job in lane.jobs.values() if not job.turn)
            for _, lane, episode in sorted(asking, key=lambda item: item[0]):
                self._request(lane, episode)

    def _request(self, lane: WorkerLane, episode: RunningEpisode) -> None:
        episode.turn = episode.sample(episode.asked)
        episode.turn.add_done_callback(partial(self._sampled, lane, episode))

    def _sampled(self, lane: WorkerLane, episode: RunningEpisode, turn: asyncio.Future[Completion]) -> None:
        if turn.cancelled() or episode.turn is not turn:  # its episode was started again
            return
        error = turn.exception()
        if error and not isinstance(error, RequestFault):
            self.fail(error)
            return
        episode.asked = episode.turn = None
        lane.turns.append((episode.ticket, error or turn.result()))
        self.flush_soon()

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task, which ends with this at the latest."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _check(self, lane: WorkerLane) -> None:
        lane.turns.append((CHECK, await self.check()))
        self.flush_soon()

    def _end(self, lane: WorkerLane, ticket: EpisodeTicket, trajectory: Trajectory) -> None:
        self.moved = asyncio.get_running_loop().time()
        episode = lane.jobs.pop(ticket)
        episode.drop_turn()
        if not episode.future.done():
            episode.future.set_result(replace(trajectory, pictures=[*episode.pictures.values()]))

    async def lost(self, lane: WorkerLane, failure: ActorLost) -> None:
        """Replace a process and start its episodes again, except those that have ended it too often."""
        log, suspects = self.workers.logs[lane.index], lane.thinking()
        for episode in suspects:
            episode.attempts += 1
            if episode.attempts >= TRIES:
                detail = f"the process of its environment {failure}; see {log}"
                self._end(lane, episode.ticket, Trajectory([], "fault", fault="died", detail=detail))
        warn(
            f"episode worker {lane.index} {failure}; starting its {len(lane.jobs)} episodes again, of which "
            f"{len(suspects)} were in their environment; its log: {log}",
            "episode-worker-lost",
        )
        lane.actor = self.workers.replacement(lane.index, lane.actor)
        for episode in lane.jobs.values():
            episode.drop_turn()
        lane.queued, lane.turns = [lane.jobs[ticket] for ticket in sorted(lane.jobs)], []
        self.flush_soon()

    async def look(self) -> None:
        """Report what the episodes wait for if none has ended for long."""
        now = asyncio.get_running_loop().time()
        if now >= self.moved + SILENT_SECONDS:
            self.moved = now
            if not self.paused():
                thinking = sum(len(lane.thinking()) for lane in self.lanes)
                head = f"no episode has ended for {SILENT_SECONDS:g} s: of {self.load}, {thinking} wait for"
                info(f"{head} an environment or agent, the others for the policy")

    def fail(self, error: Exception) -> None:
        for lane in self.lanes:
            for episode in lane.jobs.values():
                episode.drop_turn()
        super().fail(error)

    async def _result(self, actor: Actor, ref: Pending) -> Any:
        """Return the result of a remote call within the time limit of the process."""
        limit = self.workers.limit_of(actor)
        try:
            result = await asyncio.wait_for(ref, limit)
        except RayError as error:  # also if it is a TimeoutError of the process
            if isinstance(root(error), RayTaskError):
                raise RuntimeError(f"an episode worker failed: {cause(error)}") from error
            raise ActorLost(f"died: {cause(root(error))}") from None
        except TimeoutError:
            raise ActorLost(f"did not respond for {limit:g} s") from None
        self.workers.starting.discard(actor)
        return result

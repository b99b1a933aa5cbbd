"""Client of all rollout servers, for any number of callers: `completion = await client.generate(request)`.

A request goes to the least loaded server, samples of one prompt together, as they share the prefix cache. Responses are
streamed back in coalesced calls, dead servers are rebuilt, retries are bounded. Each request has its own seed, so
neither the server nor the order of completion changes the sampled tokens. Rounding depends on an engine's batches,
unless the assignment is `fixed`.

A dead server raises; a slow server only takes longer, and counts as hung once it has requests and has sampled no token
for `timeout` seconds. Either way `revive` rebuilds it and its unfinished requests are retried; if `revive` returns
None, the other servers do all the work until `replace`. A rejected request raises a RequestFault and costs no other
request; so does a request that kills servers.

Between `interrupt` and `resume` the devices can be used otherwise: callers wait longer for their responses, and get
them with the weight version of each token.

    generate --> waiting --assign--> queued --send--> sent --take--> response, or fault
                  |  ^  ^                              |  |
        interrupt |  |  +--------- server lost --------+  | interrupt
                  v  | resume                             |
                 paused <---------------------------------+
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from types import MappingProxyType
from typing import Any, Protocol

from hybridrl.core.cluster.dispatch import ActorLost, Dispatcher, Lane
from hybridrl.core.cluster.group import SILENT_SECONDS
from hybridrl.core.pictures import PictureStore
from hybridrl.core.rollout.engine import Completion, Goal, Request, RequestFault
from hybridrl.core.rollout.suspects import PendingRequest, Suspects
from hybridrl.tracking.console import warn

logger = logging.getLogger(__name__)

CHECK_SECONDS = 10.0
NO_HANDLES: Mapping[int, Any] = MappingProxyType({})
CHECKS = 9  # checks of a server's progress before its silence is reported


class RolloutFailure(RuntimeError):
    """A response could not be sampled although its server was rebuilt as often as allowed."""

    code = "rollout-failed"


class ModeError(RuntimeError):
    """The call needs the devices in the other mode: rollout or training."""

    code = "wrong-mode"


class ServerState(Enum):
    """State of a rollout server in its client. A server that waits for weights gets them with the next weight sync."""

    LIVE = "live"
    REBUILDING = "rebuilding"
    WAITING_FOR_WEIGHTS = "waiting for weights"


class ServerHandle(Protocol):
    """A rollout server as the client uses it; awaited calls raise ActorLost."""

    def submit(self, requests: list[tuple[int, Request]], goal: Goal | None, *handles: Mapping[int, Any]) -> None: ...
    def interrupt(self) -> None: ...
    async def take(self) -> list[tuple[int, Completion | RequestFault]]: ...
    async def check(self) -> int: ...  # the tokens that its engine has sampled so far
    async def activity(self) -> str: ...  # what its processes are doing
    def kill(self) -> None: ...


@dataclass(eq=False)
class ServerLane(Lane[PendingRequest]):
    """One server and its requests; `sent`: all requests sent to it since it was last idle.

    `tokens`: number of sampled tokens at the last check, at the loop time `checked`; it last changed at `moved`.
    Silence is not reported before the loop time `due_report`; `hung` is the reason if it was killed for silence.
    `deaths` counts consecutive deaths without a response in between.
    """

    actor: ServerHandle
    state: ServerState = ServerState.LIVE
    sent: list[PendingRequest] = field(default_factory=list)
    goal: Goal | None = None
    deaths: int = 0
    tokens: int = 0
    checked: float = 0.0
    moved: float = 0.0
    due_report: float = 0.0
    hung: str = ""


class RolloutClient(Dispatcher[PendingRequest, ServerLane]):
    """Servers with equal weights. `capacity` limits the requests that a server works on at a time.

    With `fixed`, prompts are assigned to servers by number, and each server gets its whole share at once; after its
    first death the whole share is sent again. Engines then form the same batches every time.
    `check_cluster` raises if the servers can never respond again. `handles` returns those of the pixels of pictures, by
    digest; servers get them with the requests that name them. `available` is set by the owner of the devices: false
    while the engines sleep.
    """

    silent_seconds = SILENT_SECONDS

    def __init__(
        self,
        servers: Sequence[ServerHandle],
        revive: Callable[[int], ServerHandle | None],
        *,
        capacity: int,
        timeout: float,
        retries: int,
        fixed: bool = False,
        check_cluster: Callable[[], None] = lambda: None,
        handles: Callable[[Iterable[int]], Mapping[int, Any]] | None = None,
    ) -> None:
        super().__init__(ServerLane(index, server) for index, server in enumerate(servers))
        self.revive, self.check_cluster, self.handles = revive, check_cluster, handles or PictureStore().handles
        self.capacity, self.timeout, self.retries, self.fixed = capacity, timeout, retries, fixed
        self.look_seconds = min(self.look_seconds, timeout / 4)
        self.available = True
        self.restarts = 0
        self.retried = dict.fromkeys(("died", "memory", "silent"), 0)  # requests, by the fate of their server
        self.reprefilled = 0  # tokens of interrupted requests that were computed again
        self._interrupted: asyncio.AbstractEventLoop | None = None  # the event loop whose requests are paused
        self._on_finished: Callable[[], None] = lambda: None
        self._paused: list[PendingRequest] = []
        self._suspects = Suspects()
        self._homes: dict[int, ServerLane] = {}  # by prompt: the server that has it cached

    def generate(self, request: Request, begun: Completion | None = None) -> asyncio.Future[Completion]:
        """Sample one response, or the rest of a `begun` one; `await` the result, in the event loop of the other
        requests in flight. KeyError if the prompt has a picture without a handle."""
        loop = asyncio.get_running_loop()
        paused = self._interrupted is loop
        if not paused and not self.available:
            raise ModeError("generate was called while the devices are in training mode; call to_rollout first")
        handles = self.handles(digest for digest, _ in pictures) if (pictures := request.pictures) else NO_HANDLES
        job = PendingRequest(next(self.tickets), loop.create_future(), request, begun, handles)
        if paused:
            self._paused.append(job)
        else:
            self.submit([job])
        return job.future

    async def interrupt(self) -> None:
        """Stop sampling, and pause all unfinished requests of this event loop until `resume`."""
        loop = asyncio.get_running_loop()
        self._interrupted = loop
        for lane in self.lanes:
            if lane.jobs:
                lane.actor.interrupt()
        await self.drained()
        if self._loop is loop:
            self.stop()
        self._paused += self.waiting
        self.waiting.clear()
        self._homes.clear()
        for lane in self.lanes:
            lane.goal = None

    def resume(self, on_finished: Callable[[], None] = lambda: None) -> None:
        """Continue the paused requests with the current weights of the engines. `on_finished` is called whenever
        responses have arrived, until the next call of `resume`."""
        self._interrupted, self._on_finished = None, on_finished
        unfinished, self._paused = [job for job in self._paused if not job.future.done()], []
        self.submit(sorted(unfinished, key=lambda job: job.request.key))
        self.reprefilled += sum(len(rest.prompt_ids) for rest in (job.rest() for job in self.waiting) if rest.begun)

    async def reach(self, goals: Sequence[Goal]) -> None:
        """Continue the paused requests until each server has stopped by itself, as its goal is reached: with `fixed`
        always after the same iteration. The unfinished ones are paused again."""
        for lane, goal in zip(self.lanes, goals, strict=True):
            lane.goal = goal
        self.resume()
        await asyncio.sleep(0)
        await self.drained()
        await self.interrupt()

    def paused(self) -> list[tuple[Request, Completion | None]]:
        """Return the requests that wait for `resume`, each with the response so far."""
        return [(job.request, job.begun) for job in self._paused if not job.future.done()]

    def generate_all(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample a response to every request, for a caller without an event loop."""

        async def gather() -> list[Completion]:
            return await asyncio.gather(*map(self.generate, requests))

        return asyncio.run(gather())

    def replace(self, index: int, server: ServerHandle) -> None:
        """Replace a server after a death outside of generation, or after `revive` returned None."""
        self.restarts += 1
        self.lanes[index] = ServerLane(index, server)

    def assign(self) -> None:
        """Give waiting requests to servers with capacity, all samples of a prompt to the same one."""
        if self._interrupted is asyncio.get_running_loop():
            return
        withheld = self._suspects.withhold(self.waiting, chain(*(lane.jobs.values() for lane in self.lanes)))
        while self.waiting:
            first = self.waiting[0].request
            lane = self._lane_of(first)
            # Later turns of an episode are queued by the engine: waiting here, they would delay requests of others.
            full = len(lane.jobs) >= self.capacity and not (self.fixed or first.turn)
            if lane.state is not ServerState.LIVE or full:
                break
            self._homes[first.prompt] = lane
            while self.waiting and self.waiting[0].request.prompt == first.prompt:
                self.give(lane, self.waiting.popleft())
        self._suspects.put_back(self.waiting, withheld)
        if not self.load:
            self._suspects.exclude_fatal()

    def _lane_of(self, request: Request) -> ServerLane:
        """Return the live server with the fewest requests (another one only if none is live). For a later turn, return
        the server of the turn before."""
        if self.fixed:
            return self.lanes[request.prompt % len(self.lanes)]
        home = self._homes.get(request.prompt)
        if request.turn and home in self.lanes and home.state is ServerState.LIVE:
            return home
        return min(self.lanes, key=lambda lane: (lane.state is not ServerState.LIVE, len(lane.jobs)))

    def send(self, lane: ServerLane) -> None:
        if lane.pump is None:
            lane.sent = []
            lane.checked = lane.moved = asyncio.get_running_loop().time()
        lane.sent += lane.queued
        handles = dict(chain.from_iterable(job.handles.items() for job in lane.queued))
        lane.actor.submit([(job.ticket, job.rest()) for job in lane.queued], lane.goal, *filter(None, [handles]))

    async def take(self, lane: ServerLane) -> list[tuple[int, Completion | RequestFault]]:
        return await lane.actor.take()

    def receive(self, lane: ServerLane, results: Sequence[tuple[int, Completion | RequestFault]]) -> None:
        lane.moved, lane.deaths = asyncio.get_running_loop().time(), 0
        for ticket, result in results:
            if job := lane.jobs.pop(ticket, None):
                self._arrived(job, result)
        self.flush()
        if not lane.jobs:
            lane.sent = []
        self._on_finished()

    def _arrived(self, job: PendingRequest, part: Completion | RequestFault) -> None:
        self._suspects.responded(job)
        if job.suspect:  # the search for a fatal request makes progress, on any server
            for lane in self.lanes:
                lane.deaths = 0
        if job.future.done():  # the caller gave up, or a whole share is retried
            return
        if isinstance(part, RequestFault):
            self._suspects.reject(job, part)
            return
        whole = part if job.begun is None else job.begun.then(part)
        if part.interrupted:
            job.begun = whole
            self._paused.append(job)
        else:
            job.future.set_result(whole)

    async def lost(self, lane: ServerLane, failure: ActorLost) -> None:
        """Rebuild a dead server and retry its unfinished requests."""
        if self._interrupted is asyncio.get_running_loop():  # the server is rebuilt when the engines are needed next
            self._paused += lane.jobs.values()
            lane.jobs = {}
            return
        lane.deaths += 1
        if lane.deaths > self.retries:
            raise RolloutFailure(
                f"rollout server {lane.index} was lost {lane.deaths} times during the same requests "
                f"(actor_rollout_ref.rollout.request_retries={self.retries}); started again, the run samples only the "
                f"missing responses of the step; the last reason:\n{failure}"
            )
        cause, kind = (lane.hung, "silent") if lane.hung else (failure.cause, failure.kind)
        jobs = lane.sent if self.fixed and self._suspects.window is None else list(lane.jobs.values())
        retried = self._suspects.lost(jobs, cause)
        message = "rollout server %d was lost (%s); rebuilding it and retrying %d requests"
        logger.warning(message, lane.index, cause, len(retried), extra={"code": "server-lost"})
        self.retried[kind] += len(retried)
        lane.hung, lane.jobs, lane.sent, lane.state = "", {}, [], ServerState.REBUILDING
        self._paused = [job for job in self._paused if job not in retried]  # interrupted before its server died
        self.waiting.extendleft(reversed(retried))
        self.flush()  # the other servers may have capacity
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, self._revive, lane))
        for other in self.lanes:  # a rebuild takes the devices' time from all
            other.moved = asyncio.get_running_loop().time()
        self.flush()

    def _revive(self, lane: ServerLane) -> None:
        """Rebuild a server. Completes even if all requests finish elsewhere first, and no caller waits."""
        state = ServerState.LIVE
        try:
            if (server := self.revive(lane.index)) is None:
                state = ServerState.WAITING_FOR_WEIGHTS
            else:
                lane.actor, self.restarts = server, self.restarts + 1
        finally:
            lane.state = state

    async def check(self) -> str:
        """Return the reason if no server can sample; "" if at least one can."""
        ailments = await asyncio.gather(*map(self._problem, self.lanes))
        return "" if "" in ailments else "; ".join(ailments)

    async def _problem(self, lane: ServerLane) -> str:
        name = f"rollout server {lane.index}"
        if lane.state is not ServerState.LIVE:
            return f"{name} was lost and is rebuilt"
        if await self._tokens(lane) is None:
            return f"{name} is dead or does not respond"
        silence = asyncio.get_running_loop().time() - lane.moved
        return f"{name} has sampled no token for {silence:.0f} s" if lane.jobs and silence > SILENT_SECONDS else ""

    async def _tokens(self, lane: ServerLane) -> int | None:
        """Return how many tokens a server has sampled; None if it is dead or does not respond."""
        try:
            return await asyncio.wait_for(lane.actor.check(), min(CHECK_SECONDS, self.timeout))
        except (ActorLost, TimeoutError):
            return None

    async def look(self) -> None:
        """Kill servers with requests that have sampled nothing for `timeout` seconds; `take` then raises."""
        self.check_cluster()
        if not any(lane.state is ServerState.REBUILDING for lane in self.lanes):
            await asyncio.gather(*(self._check(lane) for lane in self.lanes if lane.jobs))

    async def _check(self, lane: ServerLane) -> None:
        """Report a silent server, at doubling intervals; kill it at the limit."""
        loop, silent = asyncio.get_running_loop(), self.silent_seconds
        if loop.time() - lane.checked >= min(self.timeout / 4, silent / CHECKS):
            lane.checked, tokens = loop.time(), await self._tokens(lane)
            if tokens is not None and tokens != lane.tokens:
                lane.tokens, lane.moved = tokens, loop.time()
        silence = loop.time() - lane.moved
        if not lane.jobs or loop.time() < min(lane.moved + self.timeout, max(lane.moved + silent, lane.due_report)):
            return
        lane.due_report = loop.time() + silence
        server, unfinished = lane.actor, f"{len(lane.jobs)} requests unfinished"
        activity = await server.activity()  # takes seconds, in which the server may respond
        hung = loop.time() - lane.moved >= self.timeout
        limit = f" (actor_rollout_ref.rollout.request_timeout={self.timeout:g}); killing it" if hung else ""
        message = f"rollout server {lane.index} has sampled no token for {silence:.3g} s, with {unfinished}"
        warn(f"{message}{limit}: {activity}", "server-silent")
        if hung:
            lane.hung = f"killed, as it had sampled no token for {silence:.3g} s"
            server.kill()
            lane.moved = loop.time()

    def fail(self, error: Exception) -> None:
        self.waiting.extend(job for job, _ in self._suspects.fatal)
        self._suspects.fatal.clear()
        super().fail(error)

"""Client of all rollout servers, for any number of callers: `completion = await client.generate(request)`.

A request goes to the least loaded server, samples of one prompt together, as they share the prefix cache. Responses are
streamed back in coalesced calls, dead servers are rebuilt, retries are bounded. Each request has its own seed, so
neither the server nor the order in which responses finish changes a result.

A server that died raises; one that is slow merely takes longer: it counts as hung once it has sampled no token for
`timeout` seconds while it had requests. Either way it is rebuilt by `revive` and its unfinished requests are retried;
if that returns None, the other servers do all the work until `replace`. A request that is rejected, or of which servers
die, raises a RequestFault and costs no other request.

Between `interrupt` and `resume` the devices can be used otherwise: whoever awaits a response waits longer, and gets it
with the version of the weights that sampled each of its tokens.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import chain, count
from types import MappingProxyType

from hybridrl.core.cluster.watchdog import SILENT_SECONDS
from hybridrl.core.rollout.lanes import Lane, PendingRequest, ServerFailure, ServerHandle
from hybridrl.core.rollout.suspects import Suspects
from hybridrl.core.rollout.types import Completion, Goal, Key, Request, RequestFault
from hybridrl.tracking.console import warn

logger = logging.getLogger(__name__)

CHECK_SECONDS = 10.0
CHECKS = 9  # of a server's progress before its silence is reported
LOOK_SECONDS = 2.0  # between looks for servers that hang, and for a lost cluster


class RolloutFailure(RuntimeError):
    """A response could not be sampled although its server was rebuilt as often as allowed."""

    code = "rollout-failed"


class ModeError(RuntimeError):
    """The call needs the devices in the other mode: rollout or training."""

    code = "wrong-mode"


class RolloutClient:
    """Servers with equal weights. `capacity` limits the requests that a server works on at a time.

    With `fixed`, prompts are assigned to servers by number, each server gets its share at once, and the whole share
    again after a first loss, so that engines form the same batches every time. `check_cluster` raises if the servers
    can never respond again. `available` is set by the owner of the devices: false while the engines sleep.
    """

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
    ) -> None:
        self.lanes = [Lane(server) for server in servers]
        self.revive, self.check_cluster = revive, check_cluster
        self.capacity, self.timeout, self.retries, self.fixed = capacity, timeout, retries, fixed
        self.available = True
        self.restarts = 0
        self.retried = dict.fromkeys(("died", "memory", "silent"), 0)  # requests, by what became of their server
        self.reprefilled = 0  # tokens of interrupted requests that were computed again
        self.on_finished: Callable[[], None] = lambda: None  # called after responses have arrived
        self._interrupted: asyncio.AbstractEventLoop | None = None  # in which requests are held
        self._held: list[PendingRequest] = []
        self._waiting: deque[PendingRequest] = deque()
        self._suspects = Suspects()
        self._homes: dict[int, Lane] = {}  # by prompt: the server that has it cached
        self._tickets = count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dispatch_due = False
        self._watch_task: asyncio.Task | None = None
        self._error: Exception | None = None  # the last that ended all requests in flight

    def generate(self, request: Request, begun: Completion | None = None) -> asyncio.Future[Completion]:
        """Sample one response, or the rest of one that is `begun`; `await` the result, in the event loop of the other
        requests in flight."""
        held = self._interrupted is not None and self._interrupted is asyncio.get_running_loop()
        if not held and not self.available:
            raise ModeError("generate was called while the devices are in training mode; call to_rollout first")
        loop = asyncio.get_running_loop()
        job = PendingRequest(next(self._tickets), request, loop.create_future(), begun)
        if held:
            self._held.append(job)
            return job.future
        self._enter(loop)
        self._waiting.append(job)
        self._dispatch_soon(loop)
        return job.future

    def _enter(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop is not self._loop:  # what an earlier loop left unfinished has no callers any more
            self._loop, self._dispatch_due, self._watch_task = loop, False, None
            self._waiting.clear()

    def _dispatch_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._dispatch_due:  # once for all requests of this turn of the loop: they travel in one call per server
            self._dispatch_due = True
            loop.call_soon(self._dispatch)

    @property
    def load(self) -> int:
        """Requests that wait or run."""
        return len(self._waiting) + sum(len(lane.running) for lane in self.lanes)

    async def interrupt(self) -> None:
        """Stop sampling, and hold all unfinished requests of this event loop until `resume`."""
        loop = asyncio.get_running_loop()
        self._interrupted = loop
        for lane in self.lanes:
            if lane.running:
                lane.server.interrupt()
        await self.idle()
        if self._watch_task is not None and self._loop is loop:
            self._watch_task.cancel()
        self._held += self._waiting
        self._waiting.clear()
        self._homes.clear()
        self._dispatch_due = False  # a dispatch that is due will find itself interrupted
        for lane in self.lanes:
            lane.goal = None

    async def idle(self) -> None:
        """Wait until no server has a request. Raises what ended the requests in flight, if they are ended by then."""
        pumps = (lane.pump for lane in self.lanes if lane.pump is not None)
        for ended in await asyncio.gather(*pumps, return_exceptions=True):
            if isinstance(ended, asyncio.CancelledError):  # by `fail`
                raise self._error or ended

    def resume(self, goals: Sequence[Goal | None] = ()) -> None:
        """Continue the requests that are held, with the weights that the engines have now. With `fixed`, each server
        stops by itself once its goal is reached, so that it does so after the same iteration every time."""
        loop, self._interrupted = asyncio.get_running_loop(), None
        self._enter(loop)
        held, self._held = self._held, []
        for lane, goal in zip(self.lanes, goals or [None] * len(self.lanes), strict=True):
            lane.goal = goal
        self._waiting.extend(sorted((job for job in held if not job.future.done()), key=lambda job: job.request.key))
        self.reprefilled += sum(len(rest.prompt_ids) for rest in (job.rest() for job in self._waiting) if rest.begun)
        self._dispatch_soon(loop)

    def held(self) -> dict[Key, PendingRequest]:
        """Return the requests that wait for `resume`."""
        return {job.request.key: job for job in self._held if not job.future.done()}

    async def stream(
        self, requests: Sequence[Request], begun: Mapping[int, Completion] = MappingProxyType({})
    ) -> AsyncIterator[list[tuple[int, Completion | RequestFault]]]:
        """Sample a response to every request and yield them as they finish, with the indices of the requests; those
        that arrive together come in one list. Of some, by index, the beginning is known."""
        finished: asyncio.Queue[tuple[int, asyncio.Future[Completion]]] = asyncio.Queue()
        for index, request in enumerate(requests):
            future = self.generate(request, begun.get(index))
            future.add_done_callback(lambda future, index=index: finished.put_nowait((index, future)))
        missing = len(requests)
        while missing:
            arrived = [await finished.get()]
            while not finished.empty():
                arrived.append(finished.get_nowait())
            missing -= len(arrived)
            yield [(index, _outcome(future)) for index, future in arrived]

    def generate_all(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample a response to every request, for a caller without an event loop."""

        async def gather() -> list[Completion]:
            return await asyncio.gather(*map(self.generate, requests))

        return asyncio.run(gather())

    def replace(self, index: int, server: ServerHandle) -> None:
        """Replace a server that was lost while nothing was generated, or that `revive` did not return."""
        self.restarts += 1
        self.lanes[index] = Lane(server)

    def _dispatch(self) -> None:
        """Give waiting requests to servers with capacity, all samples of a prompt to the same one."""
        if self._interrupted is asyncio.get_running_loop():
            return
        self._dispatch_due = False
        given: dict[int, list[PendingRequest]] = {}
        withheld = self._suspects.withhold(self._waiting, chain(*(lane.running.values() for lane in self.lanes)))
        while self._waiting:
            first = self._waiting[0].request
            index = self._server_of(first)
            lane = self.lanes[index]
            # What continues an episode is queued by the engine: waiting here, it would hold up what others can start.
            full = len(lane.running) >= self.capacity and not (self.fixed or first.turn)
            if lane.rebuilding or lane.lost or full:
                break
            self._homes[first.prompt] = lane
            while self._waiting and self._waiting[0].request.prompt == first.prompt:
                job = self._waiting.popleft()
                lane.running[job.ticket] = job
                lane.given.append(job)
                given.setdefault(index, []).append(job)
        self._suspects.put_back(self._waiting, withheld)
        if not self.load:
            self._suspects.exclude_found()
        for index, jobs in given.items():
            lane = self.lanes[index]
            lane.server.submit([(job.ticket, job.rest()) for job in jobs], lane.goal)
            if lane.pump is None:
                lane.checked = lane.moved = asyncio.get_running_loop().time()
                lane.pump = asyncio.create_task(self._pump(lane))
        if given and (self._watch_task is None or self._watch_task.done()):
            self._watch_task = asyncio.create_task(self._watch())

    def _server_of(self, request: Request) -> int:
        """Return the server with the fewest requests, one that is lost only if all are; for a later turn, the one that
        had the turn before."""
        if self.fixed:
            return request.prompt % len(self.lanes)
        home = self._homes.get(request.prompt)
        if request.turn and home in self.lanes and not (home.rebuilding or home.lost):
            return self.lanes.index(home)

        def load(index: int) -> tuple[bool, int]:
            lane = self.lanes[index]
            return lane.rebuilding or lane.lost, len(lane.running)

        return min(range(len(self.lanes)), key=load)

    async def _pump(self, lane: Lane) -> None:
        """Fetch a server's responses as they finish until none is missing; a failure ends all requests in flight."""
        try:
            while lane.running:
                try:
                    finished = await lane.server.take()
                except ServerFailure as failure:
                    await self._rebuild(lane, failure)
                    continue
                lane.moved, lane.deaths = asyncio.get_running_loop().time(), 0
                for ticket, result in finished:
                    job = lane.running.pop(ticket, None)  # None: of requests that were abandoned
                    if job:
                        self._arrived(job, result)
                self._dispatch()
                self.on_finished()
        except Exception as error:
            self.fail(error)
        finally:
            lane.running, lane.given, lane.pump = {}, [], None

    def _arrived(self, job: PendingRequest, part: Completion | RequestFault) -> None:
        self._suspects.responded(job)
        if job.suspect:  # the search for a fatal request makes progress, on whichever server
            for lane in self.lanes:
                lane.deaths = 0
        if job.future.done():  # the caller gave up, or a whole share is retried
            return
        if isinstance(part, RequestFault):
            self._suspects.reject(job, part)
            return
        whole = job.add(part)
        if part.interrupted:
            job.begun = whole
            self._held.append(job)
        else:
            job.future.set_result(whole)

    async def _rebuild(self, lane: Lane, failure: ServerFailure) -> None:
        """Rebuild a lost server and retry what it had not finished."""
        index = self.lanes.index(lane)
        if self._interrupted is asyncio.get_running_loop():  # it is rebuilt when the engines are needed next
            self._held += lane.running.values()
            lane.running = {}
            return
        lane.deaths += 1
        if lane.deaths > self.retries:
            raise RolloutFailure(
                f"rollout server {index} was lost {lane.deaths} times during the same requests "
                f"(actor_rollout_ref.rollout.request_retries={self.retries}); started again, the run samples only the "
                f"missing responses of the step; the last reason:\n{failure}"
            )
        cause, kind = (lane.hung, "silent") if lane.hung else (failure.cause, failure.kind)
        jobs = lane.given if self.fixed and self._suspects.window is None else list(lane.running.values())
        lost = self._suspects.lost(jobs, cause)
        logger.warning(
            "rollout server %d was lost (%s); rebuilding it and retrying %d requests",
            index,
            cause,
            len(lost),
            extra={"code": "server-lost"},
        )
        self.retried[kind] += len(lost)
        lane.hung = ""
        self._held = [job for job in self._held if job not in lost]  # interrupted before its server was lost
        lane.running, lane.given, lane.rebuilding = {}, [], True
        self._waiting.extendleft(reversed(lost))
        self._dispatch()  # the other servers may have capacity

        def revive() -> None:  # completes also if all requests finish elsewhere first and this task is cancelled
            try:
                server = self.revive(index)
                if server is None:
                    lane.lost = True
                else:
                    lane.server, self.restarts = server, self.restarts + 1
            finally:
                lane.rebuilding = False

        await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, revive))
        for other in self.lanes:  # a rebuild takes the devices' time from all
            other.moved = asyncio.get_running_loop().time()
        self._dispatch()

    async def check(self) -> str:
        """Return why no server can be sampled from; "" if one can."""
        found = await asyncio.gather(*map(self._ailment, self.lanes))
        return "" if "" in found else "; ".join(found)

    async def _ailment(self, lane: Lane) -> str:
        name = f"rollout server {self.lanes.index(lane)}"
        if lane.rebuilding or lane.lost:
            return f"{name} was lost and is rebuilt"
        if await self._tokens(lane) is None:
            return f"{name} is dead or does not respond"
        silence = asyncio.get_running_loop().time() - lane.moved
        return f"{name} has sampled no token for {silence:.0f} s" if lane.running and silence > SILENT_SECONDS else ""

    async def _tokens(self, lane: Lane) -> int | None:
        """Return how many tokens a server has sampled; None if it is dead or does not respond."""
        try:
            return await asyncio.wait_for(lane.server.check(), min(CHECK_SECONDS, self.timeout))
        except (ServerFailure, TimeoutError):
            return None

    async def _watch(self) -> None:
        """Kill servers that have requests and have sampled nothing for `timeout` seconds; `take` then raises."""
        try:
            while any(lane.running or lane.rebuilding for lane in self.lanes):
                await asyncio.sleep(min(LOOK_SECONDS, self.timeout / 4))
                self.check_cluster()
                if not any(lane.rebuilding for lane in self.lanes):
                    await asyncio.gather(*(self._check(lane) for lane in self.lanes if lane.running))
        except Exception as error:
            self.fail(error)

    async def _check(self, lane: Lane) -> None:
        """Report a silent server, each time after twice as long; kill it at the limit."""
        loop = asyncio.get_running_loop()
        if loop.time() - lane.checked >= min(self.timeout / 4, SILENT_SECONDS / CHECKS):
            lane.checked, tokens = loop.time(), await self._tokens(lane)
            if tokens is not None and tokens != lane.tokens:
                lane.tokens, lane.moved = tokens, loop.time()
        silence = loop.time() - lane.moved
        if not lane.running or loop.time() < min(lane.moved + self.timeout, max(lane.moved + SILENT_SECONDS, lane.due)):
            return
        lane.due = loop.time() + silence
        server, unfinished = lane.server, f"{len(lane.running)} requests unfinished"
        activity = await server.activity()  # takes seconds, in which the server may respond
        hung = loop.time() - lane.moved >= self.timeout
        limit = f" (actor_rollout_ref.rollout.request_timeout={self.timeout:g}); killing it" if hung else ""
        message = f"rollout server {self.lanes.index(lane)} has sampled no token for {silence:.3g} s, with {unfinished}"
        warn(f"{message}{limit}: {activity}", "server-silent")
        if hung:
            lane.hung = f"killed, as it had sampled no token for {silence:.3g} s"
            server.kill()
            lane.moved = loop.time()

    def fail(self, error: Exception) -> None:
        """End every request in flight with the error."""
        self._error = error
        jobs = [
            *self._waiting,
            *self._suspects.take_found(),
            *(job for lane in self.lanes for job in lane.running.values()),
        ]
        self._waiting.clear()
        for lane in self.lanes:
            lane.running = {}
            if lane.pump is not None and lane.pump is not asyncio.current_task():
                lane.pump.cancel()
        for job in jobs:
            if not job.future.done():
                job.future.set_exception(error)
                job.future.exception()  # counts as retrieved: one caller's report is enough


def _outcome(future: asyncio.Future[Completion]) -> Completion | RequestFault:
    error = future.exception()
    return error if isinstance(error, RequestFault) else future.result()

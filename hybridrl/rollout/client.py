"""All rollout servers as one: least-loaded dispatch, finished answers streamed, dead servers replaced, retries bounded.

A server that died raises; one that is slow merely takes longer: only silence for `timeout` seconds makes it count as
hung. In either case it is rebuilt by `revive` and asked again for what it had not finished.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from hybridrl.cluster import cause, wait
from hybridrl.rollout.types import Completion, Request, Sampling

logger = logging.getLogger(__name__)

Key = tuple[int, int]

CHECK_SECONDS = 10.0


class RolloutFailure(RuntimeError):
    """An answer could not be had although its server was rebuilt as often as allowed."""


@dataclass
class Lane:
    """One server and what it is working on; `given` is all that it was asked for in this call."""

    server: ActorHandle
    running: dict[Key, Request] = field(default_factory=dict)
    given: list[Request] = field(default_factory=list)
    taking: ray.ObjectRef | None = None


class RolloutPool:
    """Servers with equal weights. `capacity` is the number of answers given to a server at a time; with `fixed` each
    is given its share of the prompts at once, whole again after a loss, so that it samples the same batches each time.
    """

    def __init__(
        self,
        servers: Sequence[ActorHandle],
        revive: Callable[[int], ActorHandle],
        *,
        capacity: int,
        timeout: float,
        retries: int,
        fixed: bool = False,
    ) -> None:
        self.lanes = [Lane(server) for server in servers]
        self.revive, self.capacity, self.timeout, self.retries = revive, capacity, timeout, retries
        self.fixed = fixed
        self.restarts = 0
        self.retried = 0

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[list[Completion]]:
        """Answer every request once; answers come in the order in which they finish."""
        waiting = deque(requests)
        attempts: dict[Key, int] = {}
        missing = {(request.prompt, request.sample) for request in requests}
        for lane in self.lanes:
            lane.given = []
        while missing:
            self._dispatch(waiting, sampling)
            for lane in self._ready():
                try:
                    completions = ray.get(lane.taking)
                except (RayActorError, RayTaskError) as error:
                    waiting.extendleft(self._replace(lane, attempts, error))
                    continue
                lane.taking = None
                for completion in completions:
                    del lane.running[completion.prompt, completion.sample]
                # A whole share that was asked for again holds answers that came before the loss.
                news = [completion for completion in completions if (completion.prompt, completion.sample) in missing]
                missing -= {(completion.prompt, completion.sample) for completion in news}
                yield news

    def replace(self, index: int, server: ActorHandle) -> None:
        """Put a new server in the place of a lost one that was not generating."""
        self.restarts += 1
        self.lanes[index] = Lane(server)

    def _dispatch(self, waiting: deque[Request], sampling: Sampling) -> None:
        """Give waiting requests to the least loaded servers, samples of one prompt together (they share its cache)."""
        given: dict[int, list[Request]] = {}
        while waiting:
            prompt = waiting[0].prompt
            index = prompt % len(self.lanes) if self.fixed else self._least_loaded()
            lane = self.lanes[index]
            if len(lane.running) >= self.capacity and not self.fixed:
                break
            while waiting and waiting[0].prompt == prompt:
                request = waiting.popleft()
                lane.running[request.prompt, request.sample] = request
                lane.given.append(request)
                given.setdefault(index, []).append(request)
        for index, requests in given.items():
            self.lanes[index].server.submit.remote(requests, sampling)
        for lane in self.lanes:
            if lane.running and lane.taking is None:
                lane.taking = lane.server.take.remote()

    def _least_loaded(self) -> int:
        return min(range(len(self.lanes)), key=lambda index: len(self.lanes[index].running))

    def _ready(self) -> list[Lane]:
        """Servers with something to fetch; where all are silent for too long, the hung ones are made to fail."""
        taking = {lane.taking: lane for lane in self.lanes if lane.taking is not None}
        done, _ = wait(list(taking), self.timeout)
        if not done:
            logger.warning("no answer finished within %g s on any of %d servers", self.timeout, len(taking))
            for lane in taking.values():
                ray.kill(lane.server)
            done = list(taking)
        more, _ = ray.wait(list(taking), num_returns=len(taking), timeout=0)
        return [taking[ref] for ref in {*done, *more}]

    def _replace(self, lane: Lane, attempts: dict[Key, int], error: RayActorError | RayTaskError) -> list[Request]:
        """Rebuild a lost server; returns what it had not finished, last first."""
        index = self.lanes.index(lane)
        if _is_well(lane.server):
            raise RolloutFailure(f"rollout server {index} is well but refused a request:\n{error}")
        lost = lane.given if self.fixed else list(lane.running.values())
        for request in lost:
            key = (request.prompt, request.sample)
            attempts[key] = attempts.get(key, 0) + 1
        most = max(attempts[request.prompt, request.sample] for request in lost)
        if most > self.retries:
            raise RolloutFailure(
                f"rollout server {index} was lost {most} times over the same answers "
                f"(actor_rollout_ref.rollout.request_retries={self.retries}); the last reason:\n{error}"
            )
        again = f"rebuilding it, {len(lost)} answers are asked for again"
        logger.warning("rollout server %d was lost (%s); %s", index, cause(error), again)
        self.restarts += 1
        self.retried += len(lost)
        lane.server, lane.running, lane.given, lane.taking = self.revive(index), {}, [], None
        return lost[::-1]


def _is_well(server: ActorHandle) -> bool:
    try:
        ray.get(server.check.remote(), timeout=CHECK_SECONDS)
    except (RayActorError, RayTaskError, GetTimeoutError):
        return False
    return True

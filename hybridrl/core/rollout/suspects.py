"""Requests in flight, and requests at fault: rejected by an engine, or fatal to servers.

Requests that were running when two servers died are run again a few at a time, to find the fatal request: one at
first, and one more with each response. If a server dies again with only one of them, this request is fatal.
"""

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from hybridrl.core.carried import identity
from hybridrl.core.cluster.dispatch import ActorJob
from hybridrl.core.rollout.engine import Completion, FatalRequest, Request, RequestFault, continuation

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class PendingRequest(ActorJob):
    """A request in flight; `begun` was sampled before an interruption. `handles` are those of its pictures' pixels, by
    digest. A `suspect` may have caused the death of a server."""

    request: Request
    begun: Completion | None = None
    handles: Mapping[int, Any] = field(default_factory=dict)
    suspect: bool = field(default=False, init=False)

    def rest(self) -> Request:
        """Return the request for the missing rest of the response."""
        return self.request if self.begun is None else continuation(self.request, self.begun)


class Suspects:
    """The requests at fault. `window`: the number of suspects that may run at a time; None if there are no suspects.
    The `fatal` ones fail once another response shows that servers can sample."""

    def __init__(self) -> None:
        self.window: int | None = None
        self.fatal: list[tuple[PendingRequest, str]] = []  # with the reason of the last death
        self.rejected = False  # whether a rejected request was reported

    def lost(self, jobs: Sequence[PendingRequest], reason: str) -> list[PendingRequest]:
        """Count the death of a server with these requests, and return the ones to run again. A request is a suspect
        from its second death on: most servers die for other reasons, and running a few requests at a time is slow."""
        for job in jobs:
            job.attempts += 1
            job.suspect = job.attempts > 1
        if not any(job.suspect for job in jobs):
            return list(jobs)
        self.window = 1
        running = [job for job in jobs if not job.future.done()]
        # If some of them saw no earlier death, one of these may be the fatal one: then a third death decides.
        twice = [job for job in running if job.attempts > (1 if all(peer.attempts > 1 for peer in running) else 2)]
        fatal = twice if len(twice) == 1 else []
        self.fatal += [(job, reason) for job in fatal]
        return [job for job in running if job not in fatal]

    def withhold(self, waiting: deque[PendingRequest], running: Iterable[PendingRequest]) -> list[PendingRequest]:
        """Remove suspects from `waiting`: those that must not run yet are returned, and those with the prompt of a
        fatal request become fatal."""
        if self.window is None:
            return []
        room = self.window - sum(job.suspect for job in running)
        withheld, others = [], []
        for job in waiting:
            if job.suspect and (reason := self._fatal_with(job.request)):
                self.fatal.append((job, reason))
                continue
            room -= job.suspect
            (withheld if job.suspect and room < 0 else others).append(job)
        waiting.clear()
        waiting.extend(others)
        if not withheld:
            self.window = None
        return withheld

    def put_back(self, waiting: deque[PendingRequest], withheld: Sequence[PendingRequest]) -> None:
        """Put suspects back into `waiting`, behind those that may run and before all other requests."""
        ahead = sum(1 for _ in takewhile(lambda job: job.suspect, waiting))
        waiting.rotate(-ahead)
        waiting.extendleft(reversed(withheld))
        waiting.rotate(ahead)

    def responded(self, job: PendingRequest) -> None:
        """Note a response: servers can sample."""
        if self.window is not None and job.suspect:
            self.window += 1
        self.exclude_fatal()

    def exclude_fatal(self) -> None:
        """Fail the fatal requests."""
        fatal, self.fatal = self.fatal, []
        for job, reason in fatal:
            size = len(job.request.prompt_ids)
            message = f"an engine died {job.attempts} times during a request with {size} prompt tokens: {reason}"
            logger.warning("%s; its episode is excluded", message, extra={"code": "request-excluded"})
            if not (job.future.done() or job.future.get_loop().is_closed()):
                job.future.set_exception(FatalRequest(message))

    def reject(self, job: PendingRequest, fault: RequestFault) -> None:
        """Fail a request that its engine rejected. Only the first is reported; all count as faults of episodes."""
        if not self.rejected:
            logger.warning("%s; its episode is excluded", fault, extra={"code": "request-excluded"})
        self.rejected = True
        job.future.set_exception(fault)

    def _fatal_with(self, request: Request) -> str | None:
        same = ((job, reason) for job, reason in self.fatal if job.request.prompt_ids == request.prompt_ids)
        carried = identity(request.carried)
        return next((reason for job, reason in same if identity(job.request.carried) == carried), None)

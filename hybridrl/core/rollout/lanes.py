"""The servers as their client sees them: what each was given, and requests in flight."""

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from hybridrl.core.rollout.types import Completion, Goal, Request, RequestFault, continuation


class ServerFailure(RuntimeError):
    """A call of a server failed; `cause` is the reason in one line, `kind` how it is counted."""

    def __init__(self, message: str, cause: str, kind: str = "died") -> None:
        super().__init__(message)
        self.cause, self.kind = cause, kind


class ServerHandle(Protocol):
    """A rollout server as the client uses it; awaited calls raise ServerFailure."""

    def submit(self, requests: list[tuple[int, Request]], goal: Goal | None = None) -> None: ...
    def interrupt(self) -> None: ...
    async def take(self) -> list[tuple[int, Completion | RequestFault]]: ...
    async def check(self) -> int: ...  # the tokens that its engine has sampled so far
    async def activity(self) -> str: ...  # where its processes are
    def kill(self) -> None: ...


@dataclass
class PendingRequest:
    """A request in flight, with the future that its caller awaits, and what was sampled before an interruption.
    `attempts` counts the servers that died with it, which one that is `suspect` may have caused."""

    ticket: int
    request: Request
    future: asyncio.Future[Completion]
    begun: Completion | None = None
    attempts: int = 0
    suspect: bool = False

    def rest(self) -> Request:
        """Return the request for what is missing."""
        return self.request if self.begun is None else continuation(self.request, self.begun)

    def add(self, part: Completion) -> Completion:
        """Return the response as far as it is sampled, with a further part."""
        return part if self.begun is None else self.begun.then(part)


@dataclass(eq=False)
class Lane:
    """One server and its work; `given` is everything that it was given since it was last idle.

    `tokens` were sampled when it was last checked, at the loop time `checked`; they last changed at `moved`.
    Its silence is not reported before the loop time `due`; `hung` says that it was killed for it. A `lost` server is
    replaced before the next weight sync. `deaths` counts those without a response in between.
    """

    server: ServerHandle
    running: dict[int, PendingRequest] = field(default_factory=dict)
    given: list[PendingRequest] = field(default_factory=list)
    pump: asyncio.Task | None = None  # fetches responses as long as any is running
    goal: Goal | None = None
    rebuilding: bool = False
    lost: bool = False
    deaths: int = 0
    tokens: int = 0
    checked: float = 0.0
    moved: float = 0.0
    due: float = 0.0
    hung: str = ""

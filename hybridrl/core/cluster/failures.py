"""Failures of remote calls: Ray's errors, of any class, as one exception with a typed cause."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ray.exceptions import (
    LocalRayletDiedError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from hybridrl.runtime.guard import kill_cause
from hybridrl.tracking.faults import MEMORY, out_of_memory

DEATHS = (RayActorError, OutOfMemoryError, WorkerCrashedError, NodeDiedError, LocalRayletDiedError)
UNEXPLAINED = "connection error code 2"  # part of Ray's message if a process ended without an error of its own


@dataclass(frozen=True)
class Cause:
    """Cause of a failed actor call: `kind` is the class of the `error` that the actor raised, else of Ray's error, and
    `text` the reason in one line. `lost`: the actor raised nothing, so a new one may succeed; `killed`: it ended
    without a message. `failure` is Ray's error."""

    actor: str
    kind: str
    text: str
    lost: bool = True
    killed: bool = False
    error: BaseException | None = None
    failure: RayError | None = None

    def __str__(self) -> str:
        return self.text

    @property
    def out_of_memory(self) -> bool:
        return getattr(self.error, "code", None) in MEMORY or bool(out_of_memory(self.text))

    @property
    def headline(self) -> str:
        """The death of the actor, or the failure of its call, in one line."""
        if isinstance(self.failure, DEATHS):
            return f"the process of {self.actor} died: {self.text}"
        return f"{self.actor} gave no result: {self.kind}: {self.text}"


class RemoteFailure(RuntimeError):
    """A remote call failed; the message names the actor, the call and the first failure with its own traceback.
    `silent`: logs of the actors that did not respond in time."""

    cause: Cause | None = None
    silent: tuple[str, ...] = ()

    code = "worker-failed"


class WorkerDied(RemoteFailure):
    """A process died or does not respond, or Ray has lost its result; a new one may succeed."""

    code = "worker-died"


class OutOfMemory(WorkerDied):
    """An actor ran out of memory in a call. Other actors may wait for it in this call: all must be started again.

    `call` names role and method, `model` the model of the call; `tokens` is the size of its largest micro-batch, if
    that has several rows.
    """

    code = "device-memory"

    def __init__(self, message: str, call: str) -> None:
        super().__init__(message)
        self.call, self.model = call, ""
        self.tokens: int | None = None


def root(error: RayError) -> RayError:
    """Return Ray's own error behind a failed call, such as the loss of an argument; else the error of the call."""
    # Ray puts a RayError in place of an exception that cannot be pickled.
    while isinstance(error, RayTaskError) and isinstance(error.cause, RayError) and type(error.cause) is not RayError:
        error = error.cause
    return error


def cause_of(error: RayError, actor: str) -> Cause:
    """Return why a call of an actor failed, for the root of its error."""
    failure = root(error)
    if isinstance(failure, RayTaskError):
        kind = type(failure.cause).__name__
        return Cause(actor, kind, cause(failure), lost=False, error=failure.cause, failure=failure)
    killed = UNEXPLAINED in str(failure)
    return Cause(actor, type(failure).__name__, cause(failure), killed=killed, failure=failure)


@contextmanager
def typed_errors(what: str) -> Iterator[None]:
    """Raise WorkerDied for an error of Ray itself, without a failing actor."""
    try:
        yield
    except RayError as error:
        reason = cause_of(error, "Ray")
        failure = WorkerDied(f"{what}: {reason.headline}")
        failure.cause = reason
        raise failure from error


def describe(error: RayError) -> str:
    """Return the worker's own exception in a line, and its traceback without Ray's frame around it."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines()
    frames = [index for index, line in enumerate(lines) if line.startswith('  File "')]
    # The message of an exception may have several lines; the first one names the error.
    after = (line for line in lines[frames[-1] :] if line[:1].strip()) if frames else iter(())
    trace = "\n".join(line for line in lines if not line.startswith("ray::") and line.strip(" ^"))
    return f"{next(after, lines[-1])}\n{trace}"


def cause(error: RayError) -> str:
    """Return Ray's reason for a death or a failure, in one line."""
    message = str(error)
    if isinstance(error, RayTaskError):
        return describe(error).splitlines()[0][:500]
    if UNEXPLAINED in message:
        return f"it ended without a message, as if killed {kill_cause()}"
    for line in message.splitlines():
        if "exit detail:" in line:
            return line.split("exit detail:", 1)[1].strip()[:500]
    return " ".join(message.split())[:500] or type(error).__name__

"""Why a remote call has no result: Ray's errors, of whatever class, as one failure with a typed cause; and of a call
that lasts, which ranks have not responded for longer than usual, and what they are doing."""

import os
import re
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
import ray
from ray.exceptions import (
    LocalRayletDiedError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybridrl.runtime.guard import kill_cause
from hybridrl.runtime.stacks import activities
from hybridrl.tracking.console import info, warn
from hybridrl.tracking.faults import MEMORY, out_of_memory

DEATHS = (RayActorError, OutOfMemoryError, WorkerCrashedError, NodeDiedError, LocalRayletDiedError)
UNEXPLAINED = "connection error code 2"  # in Ray's message about a process that ended without one
LARGEST = 5  # processes that are named when the machine is out of memory


@dataclass(frozen=True)
class Cause:
    """Why a call of an actor has no result: `kind` is the class of the `error` that it raised, else of Ray's error, and
    `text` the reason in one line. `lost`: it has raised nothing, so that a new one may succeed; `killed`: it ended
    without a message."""

    actor: str
    kind: str
    text: str
    lost: bool = True
    killed: bool = False
    error: BaseException | None = None

    def __str__(self) -> str:
        return self.text

    @property
    def out_of_memory(self) -> bool:
        return getattr(self.error, "code", None) in MEMORY or bool(out_of_memory(self.text))

    @property
    def of_host(self) -> bool:
        """Whether the memory that ran out is that of the machine, not of a GPU."""
        return out_of_memory(self.text) == "host-memory"


class RemoteFailure(RuntimeError):
    """A remote call failed; the message names the actor, the call and the first failure with its own traceback.
    `silent` are the logs of the actors that did not respond in time."""

    cause: Cause | None = None
    silent: tuple[str, ...] = ()

    code = "worker-failed"


class WorkerDied(RemoteFailure):
    """A process died or does not respond, or Ray has lost its result; a new one may succeed."""

    code = "worker-died"


class OutOfMemory(WorkerDied):
    """An actor had not enough memory for a call, in which others may wait for it: all must be started again.

    `call` names role and method; `tokens` are those of its largest micro-batch, if that has several rows.
    """

    code = "device-memory"

    def __init__(self, message: str, call: str) -> None:
        super().__init__(message)
        self.call = call
        self.tokens: int | None = None


def root(error: RayError) -> RayError:
    """Return the error of Ray that a call failed with, such as an argument that was lost; else the call's own error."""
    # Ray puts a RayError in place of an exception that cannot be pickled.
    while isinstance(error, RayTaskError) and isinstance(error.cause, RayError) and type(error.cause) is not RayError:
        error = error.cause
    return error


def cause_of(error: RayError, actor: str) -> Cause:
    """Return why a call of an actor failed, for its root error."""
    if isinstance(error, RayTaskError):
        return Cause(actor, type(error.cause).__name__, cause(error), lost=False, error=error.cause)
    return Cause(actor, type(error).__name__, cause(error), killed=UNEXPLAINED in str(error))


def headline(error: RayError, cause: Cause) -> str:
    """Return what happened to the actor of a call that Ray has no result of."""
    if isinstance(error, DEATHS):
        return f"the process of {cause.actor} died: {cause.text}"
    return f"{cause.actor} gave no result: {cause.kind}: {cause.text}"


@contextmanager
def typed(what: str) -> Iterator[None]:
    """Raise WorkerDied for an error of Ray itself, in which no actor has a part."""
    try:
        yield
    except RayError as error:
        reason = cause_of(error, "Ray")
        failure = WorkerDied(f"{what}: {headline(error, reason)}")
        failure.cause = reason
        raise failure from error


def largest_processes(logs: Sequence[str]) -> list[str]:
    """Return lines that name the largest processes of this machine, and those among them that are of this run: by the
    name of their log, where they write to one in the directory of `logs`."""
    sizes = [(one.info["memory_info"], one) for one in psutil.process_iter(["name", "memory_info"])]
    largest = sorted(((size.rss, one.pid, one.info["name"]) for size, one in sizes if size), reverse=True)[:LARGEST]
    own = dict.fromkeys([os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))], "")
    own |= {pid: f", {name}" for pid, name in named_processes(logs).items()}
    lines = []
    for size, pid, program in largest:
        mark = f"{own[pid]} of this run" if pid in own else ""
        lines.append(f"  {program}{mark} (pid {pid}): {size / (1 << 30):.2f} GiB")
    return ["the largest processes of the driver's machine now:", *lines]


def named_processes(logs: Sequence[str]) -> dict[int, str]:
    """Return the processes of this machine that write to a log in the directory of `logs`, with the log's name."""
    named = {}
    for pid in psutil.pids() if logs else ():
        with suppress(OSError):  # it has ended, or is another user's
            log = Path(os.readlink(f"/proc/{pid}/fd/2"))
            named |= {pid: log.stem} if log.parent == Path(logs[0]).parent else {}
    return named


def memory_by_role(logs: Sequence[str]) -> dict[str, float]:
    """Return metrics: the GiB of a run's processes on the driver's machine, of the driver and by what begins the names
    of their logs."""
    sizes: defaultdict[str, float] = defaultdict(float)
    for pid, name in ({os.getpid(): "driver"} | named_processes(logs)).items():
        with suppress(psutil.Error):
            role = name.partition("-")[0]
            sizes[f"perf/process_memory_gb/{role}"] += psutil.Process(pid).memory_info().rss / (1 << 30)
    return dict(sizes)


def describe(error: RayError) -> str:
    """Return the worker's own exception in a line, and its traceback without Ray's frame around it."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines()
    frames = [index for index, line in enumerate(lines) if line.startswith('  File "')]
    # The message of an exception may have several lines, of which the first one says what it is.
    after = (line for line in lines[frames[-1] :] if line[:1].strip()) if frames else iter(())
    trace = "\n".join(line for line in lines if not line.startswith("ray::") and line.strip(" ^"))
    return f"{next(after, lines[-1])}\n{trace}"


def cause(error: RayError) -> str:
    """Return Ray's reason of a death or a failure in a line."""
    message = str(error)
    if isinstance(error, RayTaskError):
        return describe(error).splitlines()[0][:500]
    if UNEXPLAINED in message:
        return f"it ended without a message, as if killed {kill_cause()}"
    for line in message.splitlines():
        if "exit detail:" in line:
            return line.split("exit detail:", 1)[1].strip()[:500]
    return " ".join(message.split())[:500] or type(error).__name__


# -- silence -----------------------------------------------------------------------------------------------------------

SILENT_SECONDS = 45.0  # without a response or a token, after which it is reported: explained within a minute
TIMES_USUAL = 5  # of the median duration of the call, if that is longer
REPLY_SECONDS = 15.0  # of the other machines

durations: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=100))  # of the calls of this run, by name


class Watch:
    """A call to several ranks that is waited for. Reports those that are silent, each time after twice as long."""

    def __init__(self, call: str, logs: Sequence[str]) -> None:
        self.call, self.logs = call, logs
        self.began = time.monotonic()
        past = list(durations[call])
        self.usual = median(past) if past else None
        self.due = max(SILENT_SECONDS, TIMES_USUAL * (self.usual or 0))

    def look(self, silent: Sequence[int]) -> None:
        """Report these ranks if it is time to."""
        seconds = time.monotonic() - self.began
        if seconds < self.due:
            return
        self.due = 2 * seconds
        report, usual = (info, "the first such call") if self.usual is None else (warn, f"usually {self.usual:.3g} s")
        head = f"{self.call}: {len(silent)} not done after {seconds:.0f} s ({usual}); still waiting"
        report("\n".join([head, *table(silent, self.logs)]))

    def end(self) -> None:
        durations[self.call].append(time.monotonic() - self.began)


def table(ranks: Sequence[int], logs: Sequence[str]) -> list[str]:
    """Return a line for each rank that has a log, with what it is doing; its stacks are then in the log."""
    found = explain([logs[rank] for rank in ranks if rank < len(logs)])
    return [f"  {name(rank, logs)}: {found[logs[rank]]}; its log: {logs[rank]}" for rank in ranks if rank < len(logs)]


def name(rank: int, logs: Sequence[str]) -> str:
    """Return the name of an actor, which its log file has as well, such as rollout-1."""
    return Path(logs[rank]).stem if rank < len(logs) else f"rank {rank}"


def explain(logs: Sequence[str]) -> dict[str, str]:
    """Return what the processes that write to each log are doing, on whatever machine of the run they are."""
    found = activities(logs)
    if missing := [log for log in logs if log not in found]:
        with suppress(RayError):  # Ray is lost
            for reply in _ask_others(missing):
                with suppress(RayError):  # the machine is lost
                    found |= ray.get(reply)
    return {log: found.get(log, "it has no process yet, or its machine does not respond") for log in logs}


def _ask_others(missing: Sequence[str]) -> list[ray.ObjectRef]:
    """Ask all other machines for the activities of the processes that write to these logs; return those that reply."""
    here = ray.get_runtime_context().get_node_id()
    others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    asking = ray.remote(num_cpus=0)(activities)
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in others]
    asked = [asking.options(scheduling_strategy=place).remote(missing) for place in places]
    return ray.wait(asked, num_returns=len(asked), timeout=REPLY_SECONDS)[0] if asked else []

"""Groups of actors: one call to all, or to each with its own arguments, with a deadline and one clear failure. Silent
ranks are reported while the call waits, with their current activity."""

import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from pathlib import Path
from statistics import median
from typing import Any, Self

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from hybridrl.core.cluster.failures import (
    Cause,
    OutOfMemory,
    RemoteFailure,
    WorkerDied,
    cause_of,
    describe,
    typed_errors,
)
from hybridrl.core.cluster.session import RaySession, lost_component
from hybridrl.required import required
from hybridrl.runtime.guard import kill_cause
from hybridrl.runtime.stacks import activities, death_note, largest_processes
from hybridrl.tracking.console import info, warn
from hybridrl.tracking.faults import of_last_process, out_of_memory

POLL_SECONDS = 2.0  # between checks that Ray is still running
SEARCHED_LINES = 300  # lines of a log that are searched for its first error
LOGGED_ERROR = re.compile(r"\b[\w.]*(Error|Exception): .+")
TIMED_OUT = re.compile("timed out|timeout", re.IGNORECASE)
# After the loss of its device or of a connection a process cannot continue; a new one can.
LOST = re.compile(r"CUDA error|NCCL error|connection (reset|closed)", re.IGNORECASE)
LOG_LINES = 8  # log lines shown for a dead actor
SILENT_SECONDS = 45.0  # seconds without a response or a token before silence is reported: explained within a minute
TIMES_USUAL = 5  # silence is not reported before this multiple of the call's median duration, if that is longer
REPLY_SECONDS = 15.0  # limit for replies of the other machines
STEP_LIMIT, START_LIMIT = "trainer.step_timeout", "trainer.startup_timeout"  # keys of the limits of calls

durations: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=100))  # seconds of this run's calls, by name

Actor = ActorHandle
Pending = ray.ObjectRef  # the result of a call that may still run


class Group:
    """Actors of one class, one per rank. Calls name the class's methods: `group.broadcast(Worker.build, config)`."""

    def __init__(self, actors: Sequence[Actor], role: str, logs: Sequence[str]) -> None:
        self.actors, self.role, self.logs = list(actors), role, list(logs)

    def __len__(self) -> int:
        return len(self.actors)

    def broadcast(self, method: Callable[..., Any], *args: Any, timeout: float, **kwargs: Any) -> list[Any]:
        """Make the same call on every actor; return the results in rank order."""
        return self.finish(self.start(method, *args, **kwargs), method, timeout=timeout)

    def scatter(
        self, method: Callable[..., Any], parts: Sequence[tuple], *, timeout: float, **kwargs: Any
    ) -> list[Any]:
        """Call every actor with its own positional arguments; return the results in rank order."""
        return self.finish(self.start_each(method, parts, **kwargs), method, timeout=timeout)

    @staticmethod
    def share(value: Any) -> Pending:
        """Store a value once per machine for all actors; the result replaces the value as an argument of calls."""
        with typed_errors("sharing the rows of a call"):
            return ray.put(value)

    @staticmethod
    def fetch(shared: Sequence[Pending]) -> list[Any]:
        """Return values that were shared."""
        with typed_errors("fetching shared values"):
            return ray.get([*shared])

    def start(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Pending]:
        """Make the same call on every actor without waiting."""
        return self.start_each(method, [args] * len(self), **kwargs)

    def start_each(self, method: Callable[..., Any], parts: Sequence[tuple], **kwargs: Any) -> list[Pending]:
        """Call every actor with its own positional arguments without waiting."""
        calls = zip(self.actors, parts, strict=True)
        return [getattr(actor, method.__name__).remote(*part, **kwargs) for actor, part in calls]

    def finish(
        self, refs: Sequence[Pending], method: Callable[..., Any], *, timeout: float, about: str = ""
    ) -> list[Any]:
        """Return the results of started calls in rank order; an error message includes `about`."""
        return gather(refs, f"{self.role}.{method.__name__}", timeout, self.logs, about=about)

    def failures(self, method: Callable[..., Any], *args: Any, timeout: float) -> dict[int, Cause]:
        """Make the same call on every actor; return the ranks that failed or did not respond in time, and why."""
        refs = self.start(method, *args)
        ready = list(_finished(refs, f"{self.role}.{method.__name__}", timeout, self.logs))
        late = "TimeoutError", f"no response within {timeout:g} s"
        silent = {rank: Cause(name(rank, self.logs), *late) for rank, ref in enumerate(refs) if ref not in ready}
        return silent | _causes(refs, ready, self.logs)

    def only(self, ranks: Sequence[int]) -> Self:
        """Return some of the actors as a group of the same kind."""
        group = copy(self)
        group.actors, group.logs = [self.actors[rank] for rank in ranks], [self.logs[rank] for rank in ranks]
        return group


def spawn(
    actor: type,
    session: RaySession,
    rank: int,
    environment: dict[str, str],
    *args: Any,
    gpus: int = 0,
    **options: Any,
) -> Actor:
    """Start one actor on a device; `gpus=1` makes it the one that Ray counts as the user of the device."""
    check_ray()
    group, bundle = session.bundle(rank)
    placement = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    options |= {"num_cpus": 0, "num_gpus": gpus * (session.device == "cuda"), "scheduling_strategy": placement}
    start: dict[str, Any] = {"env_vars": environment}
    if session.forks and session.forks.serves(environment):
        start["py_executable"] = session.forks.launch
    with typed_errors(f"starting {actor.__name__} {rank}"):
        remote: Any = ray.remote(actor)
        return remote.options(runtime_env=start, **options).remote(*args)


def kill(actor: Actor) -> None:
    """End an actor's process at once; does nothing if it has ended, or Ray with it."""
    with suppress(RayError):
        ray.kill(actor)


def control_limit(step_timeout: float) -> float:
    """Return the limit of calls that move weights or control an engine; they take seconds. It is five minutes, more
    only if the limit of a step is above its default of two hours."""
    return min(step_timeout, max(300.0, step_timeout / 24))


def gather(
    refs: Sequence[Pending],
    what: str,
    timeout: float,
    logs: Sequence[str] = (),
    *,
    key: str = STEP_LIMIT,
    about: str = "",
) -> list[Any]:
    """Return the results of remote calls. Raises the first failure as soon as it is known, or its root failure.
    `timeout` limits the time without any further result, not the total; it is set by the key `key`. `what` names role
    and method, `logs` the log files."""
    results = {}
    for ref in _finished(refs, what, timeout, logs):
        try:
            results[ref] = ray.get(ref)
        except RayError:
            raise _root_failure(refs, f"{what}{about}", refs.index(ref), logs) from None
    if len(results) < len(refs):
        raise _late(
            f"{what}{about}", [refs.index(ref) for ref in refs if ref not in results], len(results), timeout, logs, key
        )
    return [results[ref] for ref in refs]


def _finished(refs: Sequence[Pending], what: str, timeout: float, logs: Sequence[str]) -> Iterator[Pending]:
    """Yield each call once it has finished, until none does for `timeout` seconds. Ranks that are silent for longer
    than usual are reported, at doubling intervals."""
    waiting, began, past = list(refs), time.monotonic(), durations[what]
    usual = median(past) if past else None
    due = max(SILENT_SECONDS, TIMES_USUAL * (usual or 0))

    def look(silent: Sequence[Pending]) -> None:
        nonlocal due
        if (seconds := time.monotonic() - began) >= due:
            due = 2 * seconds
            report, limit = (info, "the first such call") if usual is None else (warn, f"usually {usual:.3g} s")
            head = f"{what}: {len(silent)} not done after {seconds:.0f} s ({limit}); still waiting"
            report("\n".join([head, *activity_table([refs.index(ref) for ref in silent], logs)]))

    while waiting:
        done, waiting = wait(waiting, timeout, look)
        if not done:
            return
        yield done[0]
    past.append(time.monotonic() - began)


def wait(
    refs: Sequence[Pending], timeout: float, look: Callable[[Sequence[Pending]], None] = lambda refs: None
) -> tuple[list[Pending], list[Pending]]:
    """Return one finished call, if any finishes in time, and the others. `look` is called with the unfinished calls
    every POLL_SECONDS. Raises WorkerDied if Ray is lost, which `ray.wait` itself notices late."""
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        with typed_errors("waiting for a call"):
            done, rest = ray.wait(list(refs), num_returns=1, timeout=max(min(left, POLL_SECONDS), 0))
        if done or left <= POLL_SECONDS:
            return done, rest
        check_ray()
        look(rest)


def _late(what: str, ranks: Sequence[int], responded: int, timeout: float, logs: Sequence[str], key: str) -> WorkerDied:
    """Return the failure of a call to which these ranks did not respond in time."""
    late = ", ".join(name(rank, logs) for rank in ranks)
    limit = f"; the limit follows from {key}" * bool(key)
    message = f"{what}: no response from {late} within {timeout:g} s ({responded} responded{limit})"
    chosen = dict(ray.get_runtime_context().runtime_env)
    # With a broken runtime_env no process starts, and Ray reports nothing.
    hint = f"; check ray_kwargs.ray_init.runtime_env={chosen}: processes that cannot start never respond"
    failure = WorkerDied("\n".join([message + hint * bool(chosen), *activity_table(ranks, logs)]))
    failure.silent = tuple(logs[rank] for rank in ranks if rank < len(logs))
    return failure


def check_ray() -> None:
    if component := lost_component():
        message = f"Ray's {component} ended without a message, as if killed {kill_cause()}"
        raise WorkerDied(f"{message}; the workers ended with it")


def _causes(refs: Sequence[Pending], ready: Sequence[Pending], logs: Sequence[str]) -> dict[int, Cause]:
    """Return the causes of failed calls among the `ready` ones, by rank."""
    causes = {}
    for rank, ref in enumerate(refs):
        if ref in ready:
            try:
                ray.get(ref)
            except RayError as error:
                causes[rank] = cause_of(error, name(rank, logs))
    return causes


def _head(reason: Cause, lines: list[str], log: str) -> str:
    """Return the sentence about an actor's failure; `lines` are the last ones of its log."""
    if reason.lost:
        return reason.headline + (death_note(log) if log else "")
    if reason.out_of_memory:
        return f"{reason.actor} ran out of memory: {reason.text}"
    return f"{reason.actor} failed: {_with_logged(describe(required(reason.failure)), lines, log)}"


def _root_failure(refs: Sequence[Pending], what: str, rank: int, logs: Sequence[str]) -> RemoteFailure:
    """Return the failure that caused the others: a lost rank comes before a rank that lost its peer. If a collective
    timed out, the rank for which the others waited counts as dead."""
    with typed_errors(what):
        ready, silent = ray.wait(list(refs), num_returns=len(refs), timeout=2.0)
    causes = _causes(refs, ready, logs)
    short = [index for index, reason in causes.items() if reason.out_of_memory]
    lost = [index for index, reason in causes.items() if reason.lost]
    rank = (short or lost or [rank])[0]
    reason, log = causes[rank], "".join(logs[rank : rank + 1])
    lines = _log_end(log) if log else []
    details = []
    if silent and TIMED_OUT.search("\n".join([str(reason.failure), *lines[-LOG_LINES:]])):
        details = ["not responding meanwhile:", *activity_table([refs.index(ref) for ref in silent], logs)]
    died = bool(reason.lost or details or LOST.search(reason.text))
    if reason.lost:
        check_ray()
        if lines:
            details = [f"{log} ends with:", *("  " + line[:200] for line in lines[-LOG_LINES:]), *details]
    if out_of_memory(reason.text) == "host-memory":
        details += largest_processes(logs)
    message = "\n".join([f"{what}: {_head(reason, lines, log)}", *details])
    failure = OutOfMemory(message, what) if reason.out_of_memory else (WorkerDied if died else RemoteFailure)(message)
    failure.cause = reason
    return failure


def _log_end(log: str) -> list[str]:
    try:
        written = of_last_process(Path(log).read_text(errors="replace"))
        return written.splitlines()[-SEARCHED_LINES:] or ["(nothing)"]
    except OSError:
        return ["(no such file is here: the process has written none, or is on another machine)"]


def _with_logged(description: str, lines: Sequence[str], log: str) -> str:
    """Return the description of an error with the first error in the log of its process: an engine's own processes log
    the cause, and their parent only raises that they failed."""
    logged = next((line[match.start() :] for line in lines if (match := LOGGED_ERROR.search(line))), "")
    if logged and logged not in description:
        return f"{description}\nthe first error in {log}: {logged[:500]}"
    return description


# -- silence explained -------------------------------------------------------------------------------------------------


def activity_table(ranks: Sequence[int], logs: Sequence[str]) -> list[str]:
    """Return a line for each rank with a log: its current activity. Its stacks are written to the log."""
    states = log_activities([logs[rank] for rank in ranks if rank < len(logs)])
    return [f"  {name(rank, logs)}: {states[logs[rank]]}; its log: {logs[rank]}" for rank in ranks if rank < len(logs)]


def name(rank: int, logs: Sequence[str]) -> str:
    """Return the name of an actor, such as rollout-1: the name of its log file."""
    return Path(logs[rank]).stem if rank < len(logs) else f"rank {rank}"


def log_activities(logs: Sequence[str]) -> dict[str, str]:
    """Return the activity of the processes that write to each log, on any machine of the run."""
    states = activities(logs)
    if missing := [log for log in logs if log not in states]:
        with suppress(RayError):  # Ray is lost
            for reply in _ask_others(missing):
                with suppress(RayError):  # the machine is lost
                    states |= ray.get(reply)
    return {log: states.get(log, "it has no process yet, or its machine does not respond") for log in logs}


def _ask_others(missing: Sequence[str]) -> list[ray.ObjectRef]:
    """Ask all other machines for the activities of the processes that write to these logs; return the replies."""
    here = ray.get_runtime_context().get_node_id()
    others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    asking = ray.remote(num_cpus=0)(activities)
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in others]
    asked = [asking.options(scheduling_strategy=place).remote(missing) for place in places]
    return ray.wait(asked, num_returns=len(asked), timeout=REPLY_SECONDS)[0] if asked else []

"""Actors that work together: one call to all, or to each its part, with a deadline and one clear failure."""

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridrl.cluster.session import RaySession, lost_part
from hybridrl.runtime.oom import killer

LOOK_SECONDS = 2.0  # between looks at whether Ray is still there

Actor = ActorHandle
Pending = ray.ObjectRef  # the result of a call that may still run


class RemoteFailure(RuntimeError):
    """A remote call failed: which actor, in which call, and the first failure's own traceback."""


class WorkerDied(RemoteFailure):
    """A process is gone, or silent: what it did may succeed in a new one."""


class Group:
    """Actors of one class, one a rank. Calls name the class's own methods: `group.broadcast(Worker.build, config)`."""

    def __init__(self, actors: Sequence[Actor], role: str, logs: Sequence[str]) -> None:
        self.actors, self.role, self.logs = list(actors), role, list(logs)

    def __len__(self) -> int:
        return len(self.actors)

    def broadcast(self, method: Callable[..., Any], *args: Any, timeout: float, **kwargs: Any) -> list[Any]:
        """The same call to every actor; results in rank order."""
        return self.finish(self.start(method, *args, **kwargs), method, timeout=timeout)

    def scatter(
        self, method: Callable[..., Any], parts: Sequence[tuple], *, timeout: float, **kwargs: Any
    ) -> list[Any]:
        """To each actor its own positional arguments; results in rank order."""
        return self.finish(self.start_each(method, parts, **kwargs), method, timeout=timeout)

    @staticmethod
    def share(value: Any) -> Pending:
        """Lay a value once where every actor of a machine can read it; it stands for it as an argument of a call."""
        return ray.put(value)

    def start(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Pending]:
        """The same call to every actor, without waiting for it."""
        return [getattr(actor, method.__name__).remote(*args, **kwargs) for actor in self.actors]

    def start_each(self, method: Callable[..., Any], parts: Sequence[tuple], **kwargs: Any) -> list[Pending]:
        """To each actor its own positional arguments, without waiting for it."""
        calls = zip(self.actors, parts, strict=True)
        return [getattr(actor, method.__name__).remote(*part, **kwargs) for actor, part in calls]

    def finish(self, refs: Sequence[Pending], method: Callable[..., Any], *, timeout: float) -> list[Any]:
        """The results of calls that were started, in rank order."""
        return gather(refs, self._what(method), timeout, self.logs)

    def failures(self, method: Callable[..., Any], *args: Any, timeout: float) -> dict[int, str]:
        """The same call to every actor; the ranks in which it failed or gave no answer in time, and why."""
        refs = self.start(method, *args)
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=timeout)
        silent = {rank: f"no answer within {timeout:g} s" for rank, ref in enumerate(refs) if ref not in ready}
        errors = {rank: _error(ref) for rank, ref in enumerate(refs) if ref in ready}
        return silent | {rank: cause(error) for rank, error in errors.items() if error is not None}

    def only(self, ranks: Sequence[int]) -> "Group":
        return Group([self.actors[rank] for rank in ranks], self.role, [self.logs[rank] for rank in ranks])

    def _what(self, method: Callable[..., Any]) -> str:
        return f"{self.role}.{method.__name__}"


def spawn(
    actor_class: type,
    session: RaySession,
    rank: int,
    environment: dict[str, str],
    *args: Any,
    gpus: int = 0,
    **options: Any,
) -> Actor:
    """Start one actor on a device; `gpus=1` makes it the one that Ray counts as the device's user."""
    _end_where_ray_is_lost()
    group, bundle = session.bundle(rank)
    on_cuda = session.device == "cuda"
    return (
        ray.remote(actor_class)
        .options(
            num_cpus=0,
            num_gpus=gpus if on_cuda else 0,
            runtime_env={"env_vars": environment},
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            **options,
        )
        .remote(*args)
    )


def kill(actor: Actor) -> None:
    """End an actor's process at once; nothing happens where it is dead already."""
    ray.kill(actor)


def gather(refs: Sequence[Pending], what: str, timeout: float, logs: Sequence[str] = ()) -> list[Any]:
    """Results of remote calls. The first failure is raised as soon as it is there; the others' echoes of it are not."""
    waiting, found = list(refs), {}
    while waiting:
        done, rest = wait(waiting, timeout)
        if not done:
            late = ", ".join(str(refs.index(ref)) for ref in rest)
            answered = len(refs) - len(rest)
            raise WorkerDied(
                f"{what}: no answer from rank {late} within {timeout:g} s ({answered} did answer){_environment()}"
            )
        try:
            found[done[0]] = ray.get(done[0])
        except (RayActorError, RayTaskError) as error:
            raise _root_failure(refs, what, error, refs.index(done[0]), logs) from None
        waiting = rest
    return [found[ref] for ref in refs]


def wait(refs: Sequence[Pending], timeout: float) -> tuple[list[Pending], list[Pending]]:
    """A call that has ended, if one does in time, and the others. WorkerDied where Ray is lost, which it says late."""
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        done, rest = ray.wait(list(refs), num_returns=1, timeout=max(min(left, LOOK_SECONDS), 0))
        if done or left <= LOOK_SECONDS:
            return done, rest
        _end_where_ray_is_lost()


def _end_where_ray_is_lost() -> None:
    if part := lost_part():
        raise WorkerDied(
            f"Ray's {part} ended without a word, as when it is killed {killer()}; the workers ended with it"
        )


def _environment() -> str:
    """What the user set for the processes of Ray: where that does not work, none of them starts, and Ray is silent."""
    chosen = dict(ray.get_runtime_context().runtime_env)
    return f"; is ray_kwargs.ray_init.runtime_env={chosen} in order? Processes that cannot start never answer" * bool(
        chosen
    )


def _error(ref: Pending) -> RayActorError | RayTaskError | None:
    try:
        ray.get(ref)
    except (RayActorError, RayTaskError) as error:
        return error
    return None


def _root_failure(
    refs: Sequence[Pending], what: str, first: Exception, rank: int, logs: Sequence[str]
) -> RemoteFailure:
    """The failure that the others follow from: a rank that died, before a rank that lost its peer."""
    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=2.0)
    errors = {refs.index(ref): _error(ref) for ref in ready}
    dead = [index for index, error in errors.items() if isinstance(error, RayActorError)]
    if dead:
        rank, first = dead[0], errors[dead[0]]
    where = f"\n{logs[rank]} ends with:\n{_tail(logs[rank])}" if rank < len(logs) else ""
    if isinstance(first, RayActorError):
        _end_where_ray_is_lost()
        return WorkerDied(f"{what}: the process of rank {rank} died: {cause(first)}{where}")
    return RemoteFailure(f"{what}: rank {rank} failed: {_told(first)}")


def _told(error: RayTaskError) -> str:
    """The worker's own exception in a line, and its traceback without Ray's frame around it."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines()
    trace = "\n".join(line for line in lines if not line.startswith("ray::") and line.strip(" ^"))
    return f"{lines[-1]}\n{trace}"


def cause(error: RayActorError | RayTaskError) -> str:
    """What Ray says of a death or a failure, in a line."""
    message = str(error)
    if isinstance(error, RayTaskError):
        return _told(error).splitlines()[0][:500]
    if "connection error code 2" in message:
        return f"it ended without a word, as when it is killed {killer()}"
    for line in message.splitlines():
        if "exit detail:" in line:
            return line.split("exit detail:", 1)[1].strip()[:500]
    return " ".join(message.split())[:500]


def _tail(log: str, lines: int = 8) -> str:
    try:
        text = Path(log).read_text(errors="replace")
    except OSError:
        return "  (it is on another machine)"
    return "\n".join("  " + line[:200] for line in text.splitlines()[-lines:]) or "  (nothing)"

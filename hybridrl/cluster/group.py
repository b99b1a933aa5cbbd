"""Actors that work together: one call to all, or to each its part, with a deadline and one clear failure."""

from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridrl.cluster.session import RaySession


class RemoteFailure(RuntimeError):
    """A remote call failed: which actor, in which call, and the first failure's own traceback."""


class Group:
    """Actors of one class, one a rank. Calls name the class's own methods: `group.broadcast(Worker.build, config)`."""

    def __init__(self, actors: Sequence[ActorHandle], role: str) -> None:
        self.actors, self.role = list(actors), role

    def __len__(self) -> int:
        return len(self.actors)

    def broadcast(self, method: Callable[..., Any], *args: Any, timeout: float, **kwargs: Any) -> list[Any]:
        """The same call to every actor; results in rank order."""
        return gather(self.start(method, *args, **kwargs), self._what(method), timeout)

    def scatter(
        self, method: Callable[..., Any], parts: Sequence[tuple], *, timeout: float, **kwargs: Any
    ) -> list[Any]:
        """To each actor its own positional arguments; results in rank order."""
        calls = zip(self.actors, parts, strict=True)
        refs = [getattr(actor, method.__name__).remote(*part, **kwargs) for actor, part in calls]
        return gather(refs, self._what(method), timeout)

    def start(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[ray.ObjectRef]:
        """The same call to every actor, without waiting for it."""
        return [getattr(actor, method.__name__).remote(*args, **kwargs) for actor in self.actors]

    def kill(self) -> None:
        for actor in self.actors:
            ray.kill(actor)

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
) -> ActorHandle:
    """Start one actor on a device; `gpus=1` makes it the one that Ray counts as the device's user."""
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


def gather(refs: Sequence[ray.ObjectRef], what: str, timeout: float) -> list[Any]:
    """Results of remote calls. The first failure is raised as soon as it is there; the others' echoes of it are not."""
    results: dict[ray.ObjectRef, Any] = {}
    waiting = list(refs)
    while waiting:
        done, rest = ray.wait(waiting, num_returns=1, timeout=timeout)
        if not done:
            late = ", ".join(str(refs.index(ref)) for ref in rest)
            raise RemoteFailure(
                f"{what}: no answer from rank {late} within {timeout:g} s ({len(results)} of {len(refs)} answered)"
            )
        try:
            results[done[0]] = ray.get(done[0])
        except (RayActorError, RayTaskError) as error:
            raise _root_failure(refs, what, error, refs.index(done[0])) from error
        waiting = rest
    return [results[ref] for ref in refs]


def _root_failure(refs: Sequence[ray.ObjectRef], what: str, first: Exception, rank: int) -> RemoteFailure:
    """The failure that the others follow from: a rank that died, before a rank that lost its peer."""
    if not isinstance(first, RayActorError):
        ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=2.0)
        dead = [(ref, error) for ref in ready if (error := _death(ref)) is not None]
        if dead:
            rank, first = refs.index(dead[0][0]), dead[0][1]
    if isinstance(first, RayActorError):
        return RemoteFailure(f"{what}: the process of rank {rank} died ({_cause(first)}); its log has its last words")
    return RemoteFailure(f"{what}: rank {rank} failed\n{first}")


def _death(ref: ray.ObjectRef) -> RayActorError | None:
    try:
        ray.get(ref)
    except RayActorError as error:
        return error
    except RayTaskError:
        return None
    return None


def _cause(error: RayActorError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    wanted = [line for line in lines if "exit" in line.lower() or "kill" in line.lower()]
    return (wanted or lines or ["no reason given"])[-1][:300]

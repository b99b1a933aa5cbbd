"""All rollout servers of a run: spawned, started, checked, killed and rebuilt. Knows neither trainers nor weights."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from hybridrl import device as devices
from hybridrl.cluster import Actor, Group, Pending, RaySession, cause, gather, kill, spawn
from hybridrl.cluster.group import START_LIMIT, check_ray
from hybridrl.cluster.watchdog import explain
from hybridrl.config.schema import ModelConfig, RolloutConfig
from hybridrl.rollout.client import RolloutClient, ServerFailure
from hybridrl.rollout.engine import ENGINES, RolloutEngine
from hybridrl.rollout.server import RolloutServer
from hybridrl.rollout.types import Completion, Request

CHECK_SECONDS = 30.0


class EngineGroup(Group):
    """Rollout servers as one group: a call names a method of RolloutEngine, which each server passes to its engine."""

    def start_each(self, method: Callable[..., Any], parts: Sequence[tuple], **kwargs: Any) -> list[Pending]:
        calls = zip(self.actors, parts, strict=True)
        return [actor.call.remote(method.__name__, *part, **kwargs) for actor, part in calls]


class RemoteServer:
    """A server actor as the client uses it."""

    def __init__(self, actor: Actor, log: str) -> None:
        self.actor, self.log = actor, log

    def submit(self, requests: list[tuple[int, Request]]) -> None:
        self.actor.submit.remote(requests)

    async def take(self) -> list[tuple[int, Completion]]:
        return await _result(self.actor.take.remote())

    async def check(self) -> int:
        return await _result(self.actor.call.remote(RolloutEngine.check.__name__))

    async def activity(self) -> str:
        return (await asyncio.to_thread(explain, [self.log]))[self.log]

    def kill(self) -> None:
        kill(self.actor)


async def _result(ref: Pending) -> Any:
    try:
        return await ref
    except (RayActorError, RayTaskError) as error:
        raise ServerFailure(str(error), cause(error)) from error


class RolloutFleet:
    """The servers on `devices` devices, one per tensor-parallel group. The constructor starts their processes, `start`
    their engines."""

    def __init__(
        self,
        session: RaySession,
        model: ModelConfig,
        rollout: RolloutConfig,
        *,
        devices: int,
        logs: Path,
        startup_timeout: float,
        timeout: float,
    ) -> None:
        self.session, self.model, self.rollout = session, model, rollout
        self.startup_timeout, self.timeout = startup_timeout, timeout
        self.tp_size = rollout.tensor_model_parallel_size
        names = [str(logs / f"rollout-{index}.log") for index in range(devices // self.tp_size)]
        self.lost: dict[int, str] = {}  # servers that have to be rebuilt, with the reason
        self.servers = EngineGroup(
            [self._spawn(index, log) for index, log in enumerate(names)], "rollout server", names
        )

    def __len__(self) -> int:
        return len(self.servers)

    def client(self, revive: Callable[[int], RemoteServer]) -> RolloutClient:
        """Return a client of all servers; `revive` replaces one that was lost while it generated."""
        return RolloutClient(
            [self.handle(index) for index in range(len(self))],
            revive,
            capacity=self.rollout.max_num_seqs,
            timeout=self.rollout.request_timeout,
            retries=self.rollout.request_retries,
            fixed=self.rollout.full_determinism,
            check_cluster=check_ray,
        )

    def handle(self, index: int) -> RemoteServer:
        return RemoteServer(self.servers.actors[index], self.servers.logs[index])

    def start(self, gpus: list[list[str]]) -> list[Pending]:
        """Start building every server's engine; `gpus` are those of each device. Returns the pending calls."""
        self.gpus = gpus
        return [self._start(index) for index in range(len(self))]

    def sleep(self, *, kill_failed: bool = False) -> None:
        """Put all engines to sleep. With `kill_failed` a server that does not is killed, which frees its device, and is
        rebuilt when it is needed."""
        if kill_failed:
            self.lost = self.servers.failures(RolloutEngine.sleep, timeout=self.timeout) | self.lost
            self.kill(list(self.lost))
        else:
            self.servers.broadcast(RolloutEngine.sleep, timeout=self.timeout)

    def wake(self, part: str) -> None:
        self.servers.broadcast(RolloutEngine.wake, part, timeout=self.timeout)

    def dead(self, silent: Collection[str] = ()) -> dict[int, str]:
        """Return the servers that are dead or do not respond, with the reason; those with these logs did not respond to
        another call."""
        found = {index: "it did not respond" for index, log in enumerate(self.servers.logs) if log in silent}
        self.lost = found | self.servers.failures(RolloutEngine.check, timeout=CHECK_SECONDS) | self.lost
        return self.lost

    def kill(self, indices: Sequence[int]) -> None:
        for index in indices:
            kill(self.servers.actors[index])

    def rebuild(self, index: int, *, asleep: bool = False) -> None:
        """Replace a server by a new one, awake and without weights; an old process that still lives is killed."""
        self.kill([index])
        self.lost.pop(index, None)
        log = self.servers.logs[index]
        self.servers.actors[index] = self._spawn(index, log)
        gather([self._start(index)], "rollout server.start", self.startup_timeout, [log], key=START_LIMIT)
        if asleep:
            self.servers.only([index]).broadcast(RolloutEngine.sleep, timeout=self.timeout)

    def _spawn(self, index: int, log: str) -> Actor:
        environment = devices.environment(self.session.device, self.session.per_machine)
        environment |= ENGINES[self.rollout.name].environment(self.rollout)
        # Control calls must get through while requests run: an asynchronous actor accepts as many as come.
        return spawn(RolloutServer, self.session, index * self.tp_size, environment, log, max_concurrency=1000)

    def _start(self, index: int) -> Pending:
        ranks = range(index * self.tp_size, (index + 1) * self.tp_size)
        gpus = [str(gpu) for rank in ranks for gpu in self.gpus[rank]]
        engines = self.session.per_machine // self.tp_size
        return self.servers.actors[index].start.remote(self.session.device, gpus, self.model, self.rollout, engines)

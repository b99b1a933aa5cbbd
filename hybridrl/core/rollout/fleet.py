"""All rollout servers of a run: spawned, started, checked, killed, rebuilt. Independent of trainers and weights."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from hybridrl.config.schema import ModelConfig, RolloutConfig
from hybridrl.core.cluster import Actor, Group, Pending, RaySession, RemoteFailure, gather, kill, spawn
from hybridrl.core.cluster.dispatch import ActorLost
from hybridrl.core.cluster.failures import Cause, cause_of, describe
from hybridrl.core.cluster.group import START_LIMIT, check_ray, log_activities
from hybridrl.core.rollout.client import RolloutClient
from hybridrl.core.rollout.engine import (
    Completion,
    EngineEntry,
    Goal,
    Request,
    RequestFault,
    RolloutEngine,
    engine_metrics,
)
from hybridrl.core.rollout.ladder import EngineOutOfMemory, MemoryLadder, Settings, logged, shortage, with_settings
from hybridrl.core.rollout.server import RolloutServer
from hybridrl.required import required
from hybridrl.runtime.environment import worker_environment
from hybridrl.runtime.guard import oom_kills
from hybridrl.runtime.stacks import death_note, kill_writers
from hybridrl.tracking.console import info

CHECK_SECONDS = 30.0


class EngineGroup(Group):
    """Rollout servers as one group: a call names a method of RolloutEngine, which each server passes to its engine."""

    def start_each(self, method: Callable[..., Any], parts: Sequence[tuple], **kwargs: Any) -> list[Pending]:
        calls = zip(self.actors, parts, strict=True)
        return [actor.call.remote(method.__name__, *part, **kwargs) for actor, part in calls]


class RemoteServer:
    """A server actor as the client uses it; `failure` converts a remote error to the client's ActorLost."""

    def __init__(self, actor: Actor, log: str, failure: Callable[[RayError], ActorLost]) -> None:
        self.actor, self.log, self.failure = actor, log, failure

    def submit(self, requests: list[tuple[int, Request]], goal: Goal | None, *handles: Mapping[int, Any]) -> None:
        self.actor.submit.remote(requests, goal, *handles)

    def interrupt(self) -> None:
        self.actor.interrupt.remote()

    async def take(self) -> list[tuple[int, Completion | RequestFault]]:
        return await self._result(self.actor.take.remote())

    async def check(self) -> int:
        return await self._result(self.actor.call.remote(RolloutEngine.check.__name__))

    async def activity(self) -> str:
        return (await asyncio.to_thread(log_activities, [self.log]))[self.log]

    def kill(self) -> None:
        """End all processes of the server, so that their memory is free for the next server."""
        kill(self.actor)
        kill_writers(self.log)  # a stopped one ends only so: Ray waits for it

    async def _result(self, ref: Pending) -> Any:
        try:
            return await ref
        except RayError as error:
            raise self.failure(error) from error


class RolloutFleet:
    """The servers on the devices for rollout, one per tensor-parallel group. The constructor starts their processes,
    `start` their engines."""

    def __init__(
        self,
        session: RaySession,
        engine: EngineEntry,
        model: ModelConfig,
        rollout: RolloutConfig,
        *,
        logs: Path,
        startup_timeout: float,
        timeout: float,
    ) -> None:
        self.session, self.engine, self.model, self.rollout = session, engine, model, rollout
        self.startup_timeout, self.timeout = startup_timeout, timeout
        self.tp_size = rollout.tensor_model_parallel_size
        self.ladder = MemoryLadder(rollout, session.device, engine.cache_bytes)
        self.built_with: dict[int, Settings] = {}
        self.oom_kills: dict[int, int | None] = {}  # this machine's count when a server was spawned
        self.log_starts: dict[int, int] = {}  # the size of its log at that time
        count = session.rollout.devices // self.tp_size
        names = [str(logs / f"rollout-{index}.log") for index in range(count)]
        self.holders: list[Actor] = []  # they hold devices that only rollout uses
        self.dead: dict[int, Cause] = {}  # servers that have to be rebuilt
        self.servers = EngineGroup(
            [self._spawn(index, log) for index, log in enumerate(names)], "rollout server", names
        )

    def __len__(self) -> int:
        return len(self.servers)

    def client(self, revive: Callable[[int], RemoteServer | None]) -> RolloutClient:
        """Return a client of all servers; `revive` replaces one that died while it generated."""
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
        return RemoteServer(self.servers.actors[index], self.servers.logs[index], partial(self._failure, index))

    def start(self, gpus: list[list[str]] | None = None) -> list[Pending]:
        """Start building every server's engine; returns the pending calls. `gpus`: GPUs of each device, if the trainers
        use them as well."""
        if gpus is None:
            self.holders, gpus = hold_devices(self.session, self.startup_timeout)
        self.gpus = gpus
        return [self._start(index) for index in range(len(self))]

    def finish_start(
        self, starting: Sequence[Pending], others: Sequence[Pending] = (), logs: Sequence[str] = ()
    ) -> None:
        """Wait for the engines, and for `others`, which start at the same time and have these logs. Engines that run
        out of memory are built again with less."""
        try:
            every_log = [*self.servers.logs[: len(starting)], *logs]
            gather([*starting, *others], "start-up", self.startup_timeout, every_log, key=START_LIMIT)
        except RemoteFailure as failure:
            if failure.cause is None or not (failure.cause.out_of_memory or failure.cause.killed):
                raise
            for index, ref in enumerate(starting):
                self._finish(index, ref)
            gather(others, "start-up", self.startup_timeout, logs, key=START_LIMIT)

    def note_death(self, index: int, cause: Cause) -> bool:
        """Note why a server died. Returns whether it ran out of memory. In that case, if it was built with the current
        settings, they are lowered for every engine built from now on; EngineOutOfMemory at the floor."""
        if reason := self._shortage(index, cause):
            self.ladder.lower(self.built_with[index], f"rollout server {index}: {reason}", self.servers.logs)
            self.rollout = with_settings(self.rollout, self.ladder.settings)
        return bool(reason)

    def _shortage(self, index: int, cause: Cause) -> str:
        """Return in one line how a server ran out of memory; empty if it died of another cause."""
        if isinstance(cause.error, EngineOutOfMemory):
            return cause.error.reason
        if not cause.killed:  # but possibly by Ray's memory monitor
            return cause.text if cause.out_of_memory else ""
        if oom_kills() != self.oom_kills[index]:
            return "it was killed by the kernel for lack of memory"
        # It may have been ended by an exception of C++, or by its own processes.
        return shortage(logged(Path(self.servers.logs[index]), self.log_starts[index]))

    def _failure(self, index: int, error: RayError) -> ActorLost:
        """Return a dead server's failure for the client, with all memory settings that were tried."""
        reason = cause_of(error, f"rollout server {index}")
        kind = "memory" if self.note_death(index, reason) else "died"
        note = death_note(self.servers.logs[index])
        text = reason.headline if reason.lost else describe(required(reason.failure))
        text += f"{note}; its log: {self.servers.logs[index]}"
        return ActorLost("\n".join(filter(None, [text, self.ladder.table()])), reason.text + note, kind)

    def state_dict(self) -> dict[str, Any]:
        return self.ladder.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Build engines with the memory settings that worked in the run so far."""
        before = self.ladder.settings
        self.ladder.load_state_dict(state)
        self.rollout = with_settings(self.rollout, self.ladder.settings)
        if self.ladder.settings != before:
            info(f"engines start with what had enough memory before: {self.ladder.overrides()}")

    def sleep(self, *, kill_failed: bool = False) -> None:
        """Put all engines to sleep. With `kill_failed`, servers with engines that fail to do so are killed to free
        their devices, and rebuilt when needed."""
        if kill_failed:
            self.dead = self.servers.failures(RolloutEngine.sleep, timeout=self.timeout) | self.dead
            self.kill(list(self.dead))
        else:
            self.servers.broadcast(RolloutEngine.sleep, timeout=self.timeout)

    def wake(self, part: str) -> None:
        self.servers.broadcast(RolloutEngine.wake, part, timeout=self.timeout)

    def take_metrics(self) -> dict[str, float]:
        """Return the engines' metrics since the last call; empty if an engine is dead (it is rebuilt later)."""
        try:
            stats = self.servers.broadcast(RolloutEngine.take_stats, timeout=CHECK_SECONDS)
            return engine_metrics(stats, self.rollout.max_num_seqs)
        except RemoteFailure:
            return {}

    def find_dead(self, silent: Collection[str] = ()) -> dict[int, Cause]:
        """Return the servers that are dead or do not respond, with the reason. `silent`: logs of servers that did not
        respond to another call."""
        late = {
            index: Cause(f"rollout server {index}", "TimeoutError", "it did not respond")
            for index, log in enumerate(self.servers.logs)
            if log in silent
        }
        self.dead = late | self.servers.failures(RolloutEngine.check, timeout=CHECK_SECONDS) | self.dead
        return self.dead

    def replace_all(self, reason: str) -> None:
        """Mark all servers as dead, so that they are replaced before the next weight sync."""
        self.dead |= {index: Cause(f"rollout server {index}", "", reason) for index in range(len(self))}

    def kill(self, indices: Sequence[int]) -> None:
        for index in indices:
            self.handle(index).kill()

    def rebuild(self, index: int, *, asleep: bool = False) -> None:
        """Replace a server by a new one, awake and without weights; an old process that still lives is killed. An
        engine that runs out of memory is built again with less."""
        self.kill([index])
        self.dead.pop(index, None)
        self.servers.actors[index] = self._spawn(index, self.servers.logs[index])
        self._finish(index, self._start(index))
        if asleep:
            self.servers.only([index]).broadcast(RolloutEngine.sleep, timeout=self.timeout)

    def _spawn(self, index: int, log: str) -> Actor:
        device = self.session.rollout.first + index * self.tp_size
        environment = worker_environment(self.session.device, self.session.sharing(device))
        self.oom_kills[index] = oom_kills()
        self.log_starts[index] = Path(log).stat().st_size if Path(log).exists() else 0
        environment |= self.engine.environment(self.rollout)
        # Control calls must get through while requests run: an asynchronous actor accepts as many as come.
        return spawn(RolloutServer, self.session, device, environment, log, max_concurrency=1000)

    def _start(self, index: int) -> Pending:
        ranks = range(index * self.tp_size, (index + 1) * self.tp_size)
        gpus = [str(gpu) for rank in ranks for gpu in self.gpus[rank]]
        engines = self.session.rollout.per_machine // self.tp_size
        self.built_with[index] = self.ladder.settings
        settings = self.session.device, gpus, self.model, self.rollout, engines
        return self.servers.actors[index].start.remote(self.engine, *settings)

    def _finish(self, index: int, starting: Pending) -> None:
        """Wait for an engine; one that runs out of memory is built again with less."""
        try:
            logs = [self.servers.logs[index]]
            gather([starting], "rollout server.start", self.startup_timeout, logs, key=START_LIMIT)
        except RemoteFailure as failure:
            if failure.cause is None or not self.note_death(index, failure.cause):
                raise
            self.rebuild(index)


class DeviceHolder:
    """Reserves a device: Ray counts this actor as its user, and an engine uses its GPU by number."""

    def gpus(self) -> list[str]:
        return [str(number) for number in ray.get_gpu_ids()]


def hold_devices(session: RaySession, timeout: float) -> tuple[list[Actor], list[list[str]]]:
    """Return actors that hold the devices for rollout as long as they are referenced, and the GPUs of each device. On
    CPU nothing is held, and no device has GPUs."""
    pool = session.rollout
    if session.device != "cuda":
        return [], [[] for _ in range(pool.devices)]
    holders = [spawn(DeviceHolder, session, pool.first + index, {}, gpus=1) for index in range(pool.devices)]
    return holders, gather([holder.gpus.remote() for holder in holders], "device holder.gpus", timeout, key=START_LIMIT)

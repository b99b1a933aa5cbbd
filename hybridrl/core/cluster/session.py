"""The Ray of a run: an existing one is joined and left running, otherwise one is started and stopped at the end."""

import os
import socket
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate, cycle, islice
from typing import Any

import ray
import ray._private.state
import ray._private.worker
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from hybridrl.config.findings import ConfigError
from hybridrl.core.cluster.failures import WorkerDied, typed
from hybridrl.core.cluster.start import start_ray
from hybridrl.runtime.environment import ForkServer, joins
from hybridrl.runtime.keeper import PrivateDirectory
from hybridrl.tracking.console import info

OWN_RAY_SECONDS = 60.0  # for a Ray that was started here to reserve its devices
POLL_SECONDS = 2.0
READY_SECONDS = 10.0  # for the actors of an earlier attempt to respond
REPORT_SECONDS = 60.0  # between reports of what is missing
COMPONENTS = ("raylet", "gcs_server")
CPU_DEVICE = 0.01  # CPUs that a virtual CPU device requests from Ray: they share cores, which Ray must not ration

Place = tuple[type, int]  # an actor's class, and its device


@dataclass(frozen=True)
class RayMachine:
    """A machine of a Ray cluster: host and address, Ray's number of it, and its resources, all and unreserved."""

    name: str
    node_id: str
    total: Mapping[str, float]
    free: Mapping[str, float]

    def has(self, request: Mapping[str, float]) -> bool:
        return all(self.total.get(name, 0) >= amount for name, amount in request.items())


@dataclass(frozen=True)
class Cluster:
    """The resources of each machine of a Ray cluster, and the free resources of the cluster."""

    machines: list[dict[str, float]]
    free: dict[str, float]


def query_cluster(ray_init: dict[str, Any]) -> Cluster:
    """Join the existing Ray, read its resources, and leave. Raises ConfigError if it does not respond."""
    with joined(ray_init):
        return Cluster([dict(machine.total) for machine in read_machines()], dict(ray.available_resources()))


@contextmanager
def joined(ray_init: dict[str, Any]) -> Iterator[None]:
    """Join the existing Ray for the time of the block. Raises ConfigError if it does not respond."""
    start_ray(ray_init, None)
    try:
        yield
    finally:
        ray.shutdown()


def read_machines() -> list[RayMachine]:
    """Return the machines of the Ray that this process is connected to."""
    free = ray._private.state.available_resources_per_node()
    return [
        RayMachine(
            f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})",
            node["NodeID"],
            node["Resources"],
            free.get(node["NodeID"], {}),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def join_command() -> str:
    """Return the command by which a further machine joins the Ray that this process is connected to."""
    return f"ray start --address={ray.get_runtime_context().gcs_address}"


def dashboard() -> str:
    """Return the address of Ray's dashboard, or an empty text if it has none."""
    return ray._private.worker.get_dashboard_url() or ""


def describe_reservations() -> list[str]:
    """Return the reservations of running jobs; those of a run name its driver."""
    groups = placement_group_table().values()
    return [
        f"{group['name'] or 'unnamed'}: {group['state'].lower()}, {len(group['bundles'])} device(s)"
        for group in groups
        if group["state"] != "REMOVED"
    ]


def missing_machines(machines: Sequence[RayMachine], request: Mapping[str, float], wanted: int) -> list[str]:
    """Return the machines that a run lacks; `request` is what it reserves on each of `wanted` machines."""
    fitting = sum(machine.has(request) for machine in machines)
    return [f"machine {number} of {wanted} is missing" for number in range(fitting + 1, wanted + 1)]


def describe_room(machines: Sequence[RayMachine], request: Mapping[str, float]) -> list[str]:
    """Return for each machine what is requested of it, what it has, and what of that is free."""
    lines = []
    width = max((len(machine.name) for machine in machines), default=0)
    for machine in machines:
        total, free = machine.total, machine.free
        cells = [
            f"{name}s: {amount:g} requested, {total.get(name, 0):g} in total, {free.get(name, 0):g} free"
            for name, amount in request.items()
        ]
        lines.append(f"{machine.name:{width}}  {'; '.join(cells)}")
    return lines


def lost_component() -> str | None:
    """Return the essential component that has ended of a Ray started by this process, or None."""
    node = ray._private.worker._global_node
    ended = {kind for kind, _ in node.dead_processes()} if node else set()
    return next((component for component in COMPONENTS if component in ended), None)


@dataclass(frozen=True)
class Pool:
    """Devices that are used alike, as many on each of its machines; `first` is the number of the first one among all
    devices of the run."""

    machines: int
    per_machine: int
    first: int = 0

    @property
    def devices(self) -> int:
        return self.machines * self.per_machine


class RaySession:
    """Ray for the time of a run, and the devices of the run: one bundle per device, machine by machine.

    `training` and `rollout` are the same devices, unless `rollout` is given: machines, and devices on each.
    """

    def __init__(
        self,
        device: str,
        machines: int,
        devices_per_machine: int,
        ray_init: dict[str, Any],
        timeout: float,
        forks: ForkServer | None = None,
        rollout: tuple[int, int] | None = None,
    ) -> None:
        self.joined, self.forks, self.device = joins(ray_init), forks, device
        self.training = Pool(machines, devices_per_machine)
        self.rollout = Pool(*rollout, first=self.training.devices) if rollout else self.training
        self.pools = [self.training, self.rollout] if rollout else [self.training]
        self.timeout = timeout if self.joined else min(timeout, OWN_RAY_SECONDS)
        self.directory = None if self.joined else PrivateDirectory()
        self.groups: dict[int, PlacementGroup] = {}  # one for each machine of a pool, in their order
        self.nodes: list[str] = []  # of the groups
        # Actors on devices for rollout alone: those of this attempt, which a next one may take over (None: none may),
        # and those of the last one, until `spawn` takes them.
        self.kept: dict[Place, ActorHandle] | None = None
        self.left: dict[Place, ActorHandle] = {}
        with ExitStack() as undo:
            undo.callback(self.close)
            start_ray(ray_init, self.directory)
            self._reserve()
            undo.pop_all()

    def renew(self) -> None:
        """End all actors on the devices, and reserve these again for another run."""
        self.left = {}
        self._release(list(self.groups))
        self._reserve()

    def renew_training(self) -> bool:
        """End all actors on the devices for training, which are not those for rollout, and reserve these again. Returns
        whether what is kept on the others responds: it is left to the run's next attempt."""
        self.left, self.kept = self.kept or {}, None
        try:
            self._release(list(range(self.training.machines)))
            self._reserve()
            return bool(ray.get([one.__ray_ready__.remote() for one in self.left.values()], timeout=READY_SECONDS))
        except (RayError, WorkerDied, ConfigError):  # Ray has ended, or has no other machine for one that has
            return False

    def _release(self, groups: Sequence[int]) -> None:
        for group in groups:
            remove_placement_group(self.groups.pop(group))

    def keep(self, actor: type, rank: int, handle: ActorHandle) -> ActorHandle:
        """Keep the actor of a device for rollout alone, if its class has `renew`. Returns it."""
        if self.kept is not None and rank >= self.rollout.first and hasattr(actor, "renew"):
            self.kept[actor, rank] = handle
        return handle

    @typed("reserving the devices")
    def _reserve(self) -> None:
        """Reserve one group of devices per machine; says at once, and from time to time, what it waits for."""
        sizes = self._sizes
        began, reported, ready, timeout = time.monotonic(), float("-inf"), [], self.timeout
        there = len(self.groups)
        while True:
            for index, (size, target) in enumerate(zip(sizes, self._targets(sizes), strict=False)):
                if index not in self.groups:
                    name = f"hybridrl: process {os.getpid()} on {socket.gethostname()}, machine {index}"
                    bundles = [bundle_of(self.device)] * size
                    group = placement_group(bundles, "STRICT_PACK", name, _soft_target_node_id=target)
                    self.groups[index] = group
                    ready.append(group.ready())
            done = len(ray.wait(ready, num_returns=len(ready), timeout=POLL_SECONDS)[0]) if ready else 0
            if there + done == len(sizes):
                tables = [placement_group_table(self.groups[index]) for index in range(len(sizes))]
                self.nodes = [table["bundles_to_node_id"][0] for table in tables]
                return
            state, now = self._room(there + done), time.monotonic()
            if now - began >= timeout:
                fix = f"lower them, or wait until other jobs end (ray status): {state}"
                raise ConfigError(f"Ray had no room within {timeout:g} s for {self._request}", fix=fix)
            if now - reported >= REPORT_SECONDS:
                info(f"waiting for Ray, up to trainer.startup_timeout={timeout:g} s: {state}")
                reported = now
            if len(self.groups) < len(sizes):
                time.sleep(POLL_SECONDS)

    def _targets(self, sizes: Sequence[int]) -> list[str | None]:
        """Return the machine for each group, for as many as there are machines; None leaves it to Ray."""
        if not self.joined or self.device != "cpu":
            return [None] * len(sizes)
        # Virtual devices fit anywhere: Ray would use a single machine. Rollout gets its own machines if there are any.
        wanted = max(pool.machines for pool in self.pools)
        request = request_of(self.device, max(sizes))
        fitting = [machine.node_id for machine in read_machines() if machine.has(request)]
        return [*islice(cycle(fitting), len(sizes))] if len(fitting) >= wanted else list(fitting)

    @property
    def _request(self) -> str:
        """What is reserved, by keys and values."""
        keys = ("trainer", "actor_rollout_ref.rollout")
        parts = [
            f"{key}.nnodes={pool.machines} x {key}.n_gpus_per_node={pool.per_machine}"
            for key, pool in zip(keys, self.pools, strict=False)
        ]
        return f"{' and '.join(parts)} on {self.device}"

    def _room(self, done: int) -> str:
        """Return what is reserved and what is missing, in lines."""
        here, lines = read_machines(), []
        for pool in self.pools:
            request = request_of(self.device, pool.per_machine)
            described = [*describe_room(here, request), *missing_machines(here, request, pool.machines)]
            lines += [line for line in described if pool is self.training or line not in lines]
        lines += [f"to add a machine: {join_command()}"] * self.joined
        head = f"{done} of {sum(pool.machines for pool in self.pools)} machine(s) reserved, {len(here)} in Ray:"
        return "\n  ".join([head, *lines])

    def bundle(self, device: int) -> tuple[PlacementGroup, int]:
        """Return the placement group and bundle of a device, counted over all machines of all pools."""
        group = self._group(device)
        return self.groups[group], device - self._firsts[group]

    @property
    def _sizes(self) -> list[int]:
        """The number of devices of each group."""
        return [pool.per_machine for pool in self.pools for _ in range(pool.machines)]

    @property
    def _firsts(self) -> list[int]:
        """The first device of each group."""
        return [*accumulate(self._sizes, initial=0)][:-1]

    def _group(self, device: int) -> int:
        return bisect_right(self._firsts, device) - 1

    @property
    def first_devices(self) -> list[int]:
        """The first device of each machine, of which several groups may be on one."""
        firsts: dict[str, int] = {}
        for node, first in zip(self.nodes, self._firsts, strict=True):
            firsts.setdefault(node, first)
        return list(firsts.values())

    def sharing(self, device: int) -> int:
        """Return how many devices of the run share the cores of this one's machine."""
        here = self.node(device)
        return sum(size for node, size in zip(self.nodes, self._sizes, strict=True) if node == here)

    def node(self, device: int) -> str:
        """Return Ray's number of the machine of a device."""
        return self.nodes[self._group(device)]

    def close(self) -> None:
        """Release the devices, ending all actors on them, and stop the Ray that was started here."""
        if self.joined:
            with suppress(RayError):  # it is lost, and the devices are free
                self._release(list(self.groups))
        ray.shutdown()
        if self.directory:
            self.directory.close()


def bundle_of(device: str) -> dict[str, float]:
    """Return the resources that a device requests from Ray."""
    return {"GPU": 1.0, "CPU": 1.0} if device == "cuda" else {"CPU": CPU_DEVICE}


def request_of(device: str, devices: int) -> dict[str, float]:
    """Return the resources that a number of devices of one machine request from Ray."""
    return {name: amount * devices for name, amount in bundle_of(device).items()}

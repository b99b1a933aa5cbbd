"""The Ray of a run: an existing Ray is joined and left running. Otherwise a Ray that only this user can reach is
started, and stopped at the end."""

import logging
import math
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import ray
import ray._private.ray_constants
import ray._private.state
import ray._private.utils
import ray._private.worker
import ray._raylet
from ray._raylet import Config, GcsClient
from ray.exceptions import RayError
from ray.util.metrics import Gauge
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from hybridrl.config.findings import ConfigError
from hybridrl.core.cluster.failures import typed_errors
from hybridrl.runtime.environment import ForkServer, joins, ray_token
from hybridrl.runtime.guard import REQUESTS
from hybridrl.runtime.keeper import PrivateDirectory
from hybridrl.tracking.console import info
from hybridrl.tracking.sink import Sink

OWN_RAY_SECONDS = 60.0  # limit for a Ray that was started here to reserve its devices
POLL_SECONDS = 2.0
REPORT_SECONDS = 60.0  # between reports of missing devices
COMPONENTS = ("raylet", "gcs_server")
CPU_DEVICE = 0.01  # CPUs that a virtual CPU device requests from Ray: they share cores, which Ray must not ration

CONNECT_SECONDS = 10.0
# First bytes of a gRPC client, and the type of the first frame of a server's response. For any other program at the
# address, such as its dashboard, Ray itself would wait for minutes.
HTTP2_PREFACE, HTTP2_SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", b"\4"
METRIC, TAGS = "hybridrl_metric", ("metric", "project", "experiment")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RayMachine:
    """A machine of a Ray cluster: host and address, Ray's id for it, its total and its unreserved resources."""

    name: str
    node_id: str
    total: Mapping[str, float]
    free: Mapping[str, float]

    def has(self, request: Mapping[str, float]) -> bool:
        return all(self.total.get(name, 0) >= amount for name, amount in request.items())


@dataclass(frozen=True)
class RayNode:
    """A node that has joined the Ray of this process, alive or dead. `label`: its `ray start --node-name`; `seconds`
    since it joined, or since it died, and then the `reason`."""

    host: str
    address: str
    label: str
    alive: bool
    seconds: float
    reason: str = ""

    @property
    def name(self) -> str:
        return f"{self.host} ({self.address})"


def start_ray(ray_init: dict[str, Any], directory: PrivateDirectory | None) -> None:
    """Join the existing Ray, or start one that keeps its files in `directory`."""
    if hook := os.environ.pop("RAY_RUNTIME_ENV_HOOK", None):  # workers run the driver's interpreter and sources
        logger.info("RAY_RUNTIME_ENV_HOOK=%s is not used: workers need no other environment", hook)
    if loader := vars(ray._raylet).get("AuthenticationTokenLoader"):
        loader.instance().reset_cache()  # this process may have had another Ray, with another token
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    logging.getLogger("ray").setLevel(logging.ERROR)
    if directory:
        # Ray makes its directory accessible to everyone, so it is placed inside the private one.
        options |= {"address": "local", "include_dashboard": False, "_temp_dir": f"{directory.path}/ray"}
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        Config.initialize("")  # Ray reads its environment again
    else:
        # From 2.60 on `ray start` requires the token that it made, and ray.init does not send it by itself.
        send_token = vars(ray._private.worker).get("maybe_enable_token_auth_if_token_available")
        if send_token:
            send_token(warn_if_disabled=False)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray prints a page per dead actor; RemoteFailure names the actor and the cause if it matters.
    vars(ray._private.worker)["listen_error_messages"] = lambda *_: None
    vars(ray._private.utils)["set_sigterm_handler"] = lambda _: None  # a signal stops the run by name, also meanwhile
    address = ray_address(ray_init)
    try:
        if not directory and (reason := no_response(address)):  # ray.init would retry it indefinitely
            raise ConnectionError(reason)
        with _isolated(directory) if directory else nullcontext():
            ray.init(**options | ray_init)
        REQUESTS.raise_again()
    except ConnectionError as error:
        raise ConfigError(
            f"no Ray responds at {address} (RAY_ADDRESS or ray_kwargs.ray_init.address): {str(error)[:200]}",
            fix="start it with ray start --head, or unset the address to have one started here",
        ) from error


def ray_address(ray_init: dict[str, Any]) -> str:
    """Return the address of the existing Ray that a run joins; empty if none is named."""
    return ray_init.get("address") or os.environ.get("RAY_ADDRESS") or ""


def no_response(address: str) -> str:
    """Return why no Ray responds at an address; empty if it responds, or if the address has no port."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdecimal():
        return ""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS) as connection:
            connection.sendall(HTTP2_PREFACE)
            if os.environ.get("RAY_USE_TLS", "0") == "0" and connection.recv(4)[3:] != HTTP2_SETTINGS:
                return "another program listens there"
    except OSError as error:
        return str(error)
    return ""


@contextmanager
def _isolated(directory: PrivateDirectory) -> Iterator[None]:
    """Make a Ray that is started in the block use its private directory and listen on the loopback only."""
    tempfile.gettempdir()  # cached before TMPDIR changes: this process keeps its directory
    environment = directory.environment | ray_token(directory.path)
    constants, before = ray._private.ray_constants, {name: os.environ.get(name) for name in environment}
    clusters, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    os.environ.update(environment)
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = clusters
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


@contextmanager
def existing_ray(ray_init: dict[str, Any]) -> Iterator[None]:
    """Join the existing Ray within the block. Raises ConfigError if it does not respond."""
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


def read_nodes() -> list[RayNode]:
    """Return all nodes that have joined the Ray of this process; those of a machine in the order in which they did."""
    client, now = GcsClient(address=ray.get_runtime_context().gcs_address), 1000 * time.time()
    return [
        RayNode(
            node.node_manager_hostname,
            node.node_manager_address,
            node.node_name,
            node.state == node.ALIVE,
            (now - (node.end_time_ms or node.start_time_ms)) / 1000,
            node.death_info.reason_message,
        )
        for node in sorted(client.get_all_node_info().values(), key=lambda node: node.start_time_ms)
    ]


def join_command() -> str:
    """Return the command with which a further machine joins the Ray of this process."""
    return f"ray start --address={ray.get_runtime_context().gcs_address}"


def missing_machines(machines: Sequence[RayMachine], request: Mapping[str, float], needed: int) -> list[str]:
    """Return the machines that a run lacks; it reserves the resources of `request` on each of `needed` machines."""
    fitting = sum(machine.has(request) for machine in machines)
    return [f"machine {number} of {needed} is missing" for number in range(fitting + 1, needed + 1)]


def describe_room(machines: Sequence[RayMachine], request: Mapping[str, float]) -> list[str]:
    """Return a line for each machine: its requested, total and free resources."""
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
    """Return an essential component that has ended, of the Ray started by this process, or None."""
    node = ray._private.worker._global_node
    ended = {kind for kind, _ in node.dead_processes()} if node else set()
    return next((component for component in COMPONENTS if component in ended), None)


@dataclass(frozen=True)
class Pool:
    """Devices with the same use, equally many on each machine; `first` is the index of the first one among all devices
    of the run."""

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
        # Devices of each group:
        self.sizes = [pool.per_machine for pool in self.pools for _ in range(pool.machines)]
        self.places = [(group, bundle) for group, size in enumerate(self.sizes) for bundle in range(size)]  # by device
        self.groups: dict[int, PlacementGroup] = {}  # one for each machine of a pool, in their order
        self.nodes: list[str] = []  # Ray's id of each group's machine
        with ExitStack() as undo:
            undo.callback(self.close)
            start_ray(ray_init, self.directory)
            self._reserve()
            undo.pop_all()

    def renew(self) -> None:
        """End all actors on the devices, and reserve the devices again for another run."""
        self._release()
        self._reserve()

    def _release(self) -> None:
        for index in list(self.groups):
            remove_placement_group(self.groups.pop(index))

    @typed_errors("reserving the devices")
    def _reserve(self) -> None:
        """Reserve one group of devices per machine; logs at once, and from time to time, what is missing."""
        sizes = self.sizes
        began, reported, ready, timeout = time.monotonic(), float("-inf"), [], self.timeout
        while True:
            for index, (size, target) in enumerate(zip(sizes, self._targets(sizes), strict=False)):
                if index not in self.groups:
                    name = f"hybridrl: process {os.getpid()} on {socket.gethostname()}, machine {index}"
                    bundles = [bundle_of(self.device)] * size
                    group = placement_group(bundles, "STRICT_PACK", name, _soft_target_node_id=target)
                    self.groups[index] = group
                    ready.append(group.ready())
            done = len(ray.wait(ready, num_returns=len(ready), timeout=POLL_SECONDS)[0]) if ready else 0
            if done == len(sizes):
                tables = [placement_group_table(self.groups[index]) for index in range(len(sizes))]
                self.nodes = [table["bundles_to_node_id"][0] for table in tables]
                return
            state, now = self._room(done), time.monotonic()
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
        needed = max(pool.machines for pool in self.pools)
        request = request_of(self.device, max(sizes))
        fitting = [machine.node_id for machine in read_machines() if machine.has(request)]
        return [*islice(cycle(fitting), len(sizes))] if len(fitting) >= needed else list(fitting)

    @property
    def _request(self) -> str:
        """The requested devices, as configuration keys and values."""
        keys = ("trainer", "actor_rollout_ref.rollout")
        parts = [
            f"{key}.nnodes={pool.machines} x {key}.n_gpus_per_node={pool.per_machine}"
            for key, pool in zip(keys, self.pools, strict=False)
        ]
        return f"{' and '.join(parts)} on {self.device}"

    def _room(self, done: int) -> str:
        """Return the reserved and the missing resources, as lines."""
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
        group, bundle = self.places[device]
        return self.groups[group], bundle

    def node(self, device: int) -> str:
        """Return Ray's id of the machine of a device."""
        return self.nodes[self.places[device][0]]

    @property
    def first_devices(self) -> list[int]:
        """The first device of each machine; several groups may be on one machine."""
        firsts: dict[str, int] = {}
        for device in range(len(self.places)):
            firsts.setdefault(self.node(device), device)
        return list(firsts.values())

    def sharing(self, device: int) -> int:
        """Return how many devices of the run share the cores of this one's machine."""
        return [self.node(other) for other in range(len(self.places))].count(self.node(device))

    def close(self) -> None:
        """Release the devices and end all actors on them; stop Ray if it was started here."""
        if self.joined:
            with suppress(RayError):  # Ray is lost, and the devices are free
                self._release()
        ray.shutdown()
        if self.directory:
            self.directory.close()


def bundle_of(device: str) -> dict[str, float]:
    """Return the resources that a device requests from Ray."""
    return {"GPU": 1.0, "CPU": 1.0} if device == "cuda" else {"CPU": CPU_DEVICE}


def request_of(device: str, devices: int) -> dict[str, float]:
    """Return the resources that a number of devices of one machine request from Ray."""
    return {name: amount * devices for name, amount in bundle_of(device).items()}


class RayMetricsSink(Sink):
    """Exports a run's metrics with Ray's own; Prometheus reads them if `ray start` had a `--metrics-export-port`. The
    gauge `ray_hybridrl_metric{metric="actor/entropy", ...}` has the last value of each metric."""

    def __init__(self, project: str, experiment: str) -> None:
        self._gauge = Gauge(METRIC, "the last value of each metric of a run", TAGS)
        self._gauge.set_default_tags({"project": project, "experiment": experiment})

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in {"training/global_step": step, **metrics}.items():
            if math.isfinite(value):
                self._gauge.set(float(value), tags={"metric": name})

"""The Ray of a run: an existing one is joined and left running, otherwise one is started and stopped at the end."""

import logging
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import ray
import ray._private.ray_constants
import ray._private.worker
from ray._raylet import Config
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from hybridrl.config import ConfigError
from hybridrl.runtime.keeper import PrivateDirectory

CONNECT_SECONDS = 10.0
COMPONENTS = ("raylet", "gcs_server")
CPU_DEVICE = 0.01  # CPUs that a virtual CPU device requests from Ray: they share cores, which Ray must not ration


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cluster:
    """The resources of each machine of a Ray cluster, and the free resources of the cluster."""

    machines: list[dict[str, float]]
    free: dict[str, float]


def joins(ray_init: dict[str, Any]) -> bool:
    """Whether a run joins an existing Ray instead of starting its own."""
    return bool(os.environ.get("RAY_ADDRESS") or ray_init.get("address"))


def query_cluster(ray_init: dict[str, Any]) -> Cluster:
    """Join the existing Ray, read its resources, and leave. Raises ConfigError if it does not respond."""
    _start(ray_init, None)
    try:
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return Cluster(alive, ray.available_resources())
    finally:
        ray.shutdown()


def lost_component() -> str | None:
    """Return the essential component that has ended of a Ray started by this process, or None."""
    node = ray._private.worker._global_node
    ended = {kind for kind, _ in node.dead_processes()} if node else set()
    return next((component for component in COMPONENTS if component in ended), None)


class RaySession:
    """Ray for the time of a run, and the devices of the run: one bundle per device, machine by machine."""

    def __init__(self, device: str, machines: int, devices_per_machine: int, ray_init: dict[str, Any], timeout: float):
        self.joined = joins(ray_init)
        self.device, self.per_machine = device, devices_per_machine
        self.directory = None if self.joined else PrivateDirectory()
        self.groups: list[PlacementGroup] = []
        try:
            _start(ray_init, self.directory)
            bundles = [bundle_of(device) for _ in range(devices_per_machine)]
            self.groups = [placement_group(bundles, strategy="STRICT_PACK") for _ in range(machines)]
            waiting = [group.ready() for group in self.groups]
            limit = timeout if self.joined else min(timeout, 60)
            if ray.wait(waiting, num_returns=len(waiting), timeout=limit)[1]:
                total, free = ray.cluster_resources(), ray.available_resources()
                raise ConfigError(
                    f"Ray has no room for {machines} machine(s) with {devices_per_machine} {device} device(s) each: it "
                    f"has {total.get('GPU', 0):g} GPUs ({free.get('GPU', 0):g} free) on {len(ray.nodes())} machine(s)",
                    fix="lower trainer.nnodes or trainer.n_gpus_per_node, or wait until other jobs end (ray status)",
                )
        except BaseException:
            self.close()
            raise

    def bundle(self, rank: int) -> tuple[PlacementGroup, int]:
        """Return the placement group and bundle of a device, counted over all machines."""
        return self.groups[rank // self.per_machine], rank % self.per_machine

    def close(self) -> None:
        """Release the devices, ending all actors on them, and stop the Ray that was started here."""
        if self.joined:
            for group in self.groups:
                remove_placement_group(group)
        ray.shutdown()
        if self.directory:
            self.directory.close()


def bundle_of(device: str) -> dict[str, float]:
    """Return the resources that a device requests from Ray."""
    return {"GPU": 1.0, "CPU": 1.0} if device == "cuda" else {"CPU": CPU_DEVICE}


def _start(ray_init: dict[str, Any], directory: PrivateDirectory | None) -> None:
    """Join the existing Ray, or start one that keeps its files in `directory`."""
    if hook := os.environ.pop(
        "RAY_RUNTIME_ENV_HOOK", None
    ):  # workers run the driver's interpreter and sources as they are
        logger.info("RAY_RUNTIME_ENV_HOOK=%s is not used: workers need no other environment", hook)
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    logging.getLogger("ray").setLevel(logging.ERROR)
    if directory:
        # Ray makes its directory accessible to everyone, so it is placed inside the private one.
        options |= {"address": "local", "include_dashboard": False, "_temp_dir": f"{directory.path}/ray"}
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        Config.initialize("")  # Ray reads its environment again
    else:
        # From 2.60 on `ray start` requires the token it made, and ray.init does not send it by itself.
        send_token = vars(ray._private.worker).get("maybe_enable_token_auth_if_token_available")
        if send_token:
            send_token(warn_if_disabled=False)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray prints a page per dead actor; RemoteFailure names the actor and the cause if it matters.
    ray._private.worker.listen_error_messages = lambda *_: None
    on_termination = signal.getsignal(signal.SIGTERM)
    address = ray_init.get("address") or os.environ.get("RAY_ADDRESS") or ""
    try:
        host, _, port = address.rpartition("://")[2].rpartition(":")
        if not directory and port.isdecimal():  # ray.init would retry an address where nothing listens indefinitely
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
            except OSError as error:
                raise ConnectionError(str(error)) from error
        with _isolated(directory) if directory else nullcontext():
            ray.init(**options | ray_init)
    except ConnectionError as error:
        raise ConfigError(
            f"no Ray responds at {address} (RAY_ADDRESS or ray_kwargs.ray_init.address)",
            fix="start it with ray start --head, or unset the address to have one started here",
        ) from error
    finally:
        signal.signal(signal.SIGTERM, on_termination)


@contextmanager
def _isolated(directory: PrivateDirectory) -> Iterator[None]:
    """Have a Ray that is started here use its private directory and listen on this machine's loopback only."""
    tempfile.gettempdir()  # cached before TMPDIR changes: this process keeps its directory
    constants, before = ray._private.ray_constants, {name: os.environ.get(name) for name in directory.environment}
    clusters, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    os.environ.update(directory.environment)
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = clusters
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value

"""A Ray to run on: one that is there is joined and left running; else one is started and stopped at the end."""

import logging
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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
PARTS = ("raylet", "gcs_server")
SLOT = 0.01  # CPUs that a slot on CPU asks Ray for: slots share cores, and Ray is not to ration them


@dataclass(frozen=True)
class Cluster:
    """What the machines of a Ray have, one by one, and what of it all is free."""

    machines: list[dict[str, float]]
    free: dict[str, float]


def joins(ray_init: dict[str, Any]) -> bool:
    """Whether a run joins a Ray that is there, rather than starting its own."""
    return bool(os.environ.get("RAY_ADDRESS") or ray_init.get("address"))


def ask_cluster(ray_init: dict[str, Any]) -> Cluster:
    """Join the Ray there is, look, and leave. ConfigError where none answers."""
    _start(ray_init, None)
    try:
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return Cluster(alive, ray.available_resources())
    finally:
        ray.shutdown()


def lost_part() -> str | None:
    """The part of the Ray that was started here which nothing works without and which has ended, if there is one."""
    node = ray._private.worker._global_node
    ended = {kind for kind, _ in node.dead_processes()} if node else set()
    return next((part for part in PARTS if part in ended), None)


class RaySession:
    """Ray for the time of a run, and the devices the run may use: one bundle each, machine by machine."""

    def __init__(self, device: str, machines: int, devices_per_machine: int, ray_init: dict[str, Any], timeout: float):
        self.joined = joins(ray_init)
        self.device, self.per_machine = device, devices_per_machine
        self.directory = None if self.joined else PrivateDirectory()
        self.groups: list[PlacementGroup] = []
        try:
            _start(ray_init, self.directory)
            self.groups = [_reserve(device, devices_per_machine) for _ in range(machines)]
            self._await(machines, timeout)
        except BaseException:
            self.close()
            raise

    def bundle(self, rank: int) -> tuple[PlacementGroup, int]:
        """The placement group and bundle of a device, counted over all machines."""
        return self.groups[rank // self.per_machine], rank % self.per_machine

    def close(self) -> None:
        """Give the devices back, with every actor on them; stop the Ray that was started here."""
        if self.joined:
            for group in self.groups:
                remove_placement_group(group)
        ray.shutdown()
        if self.directory:
            self.directory.close()

    def _await(self, machines: int, timeout: float) -> None:
        waiting = [group.ready() for group in self.groups]
        limit = timeout if self.joined else min(timeout, 60)
        _, missing = ray.wait(waiting, num_returns=len(waiting), timeout=limit)
        if missing:
            total, free = ray.cluster_resources(), ray.available_resources()
            raise ConfigError(
                f"Ray has no place for {machines} machine(s) with {self.per_machine} {self.device} device(s) each: it "
                f"has {total.get('GPU', 0):g} GPUs ({free.get('GPU', 0):g} free) on {len(ray.nodes())} machine(s); "
                "lower trainer.nnodes or trainer.n_gpus_per_node, or wait until other jobs end (ray status)"
            )


def _start(ray_init: dict[str, Any], directory: PrivateDirectory | None) -> None:
    """Join the Ray there is, or start one that keeps its files in `directory`."""
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    logging.getLogger("ray").setLevel(logging.ERROR)
    if directory:
        # Ray makes its own directory open to everyone, so that it is one within the private one.
        options |= {"address": "local", "include_dashboard": False, "_temp_dir": f"{directory.path}/ray"}
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        Config.initialize("")  # Ray reads its environment again
    else:
        # From 2.60 on `ray start` asks for the token it made, and ray.init does not send it by itself.
        send_token = vars(ray._private.worker).get("maybe_enable_token_auth_if_token_available")
        if send_token:
            send_token(warn_if_disabled=False)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray prints a page about every actor that dies; ours says which, and why, where it matters.
    ray._private.worker.listen_error_messages = lambda *_: None
    on_termination = signal.getsignal(signal.SIGTERM)
    where = ray_init.get("address") or os.environ.get("RAY_ADDRESS") or ""
    try:
        if not directory:
            _knock(where)
        with _alone(directory):
            ray.init(**options | ray_init)
    except ConnectionError as error:
        raise ConfigError(
            f"no Ray answers at {where} (RAY_ADDRESS or ray_kwargs.ray_init.address); start it with ray start --head, "
            "or unset the address to have one started here"
        ) from error
    finally:
        signal.signal(signal.SIGTERM, on_termination)


@contextmanager
def _alone(directory: PrivateDirectory | None) -> Iterator[None]:
    """Have the Ray that is started here, if one is, work in its directory and listen on this machine's loopback."""
    if directory is None:
        yield
        return
    tempfile.gettempdir()  # found once, before TMPDIR is changed: this process works where it did
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


def _knock(address: str) -> None:
    """ConnectionError where nobody listens at host:port: ray.init would go on trying for ever."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
        except OSError as error:
            raise ConnectionError(str(error)) from error


def bundle_of(device: str) -> dict[str, float]:
    """What a device asks Ray for."""
    return {"GPU": 1.0, "CPU": 1.0} if device == "cuda" else {"CPU": SLOT}


def _reserve(device: str, devices: int) -> PlacementGroup:
    return placement_group([bundle_of(device) for _ in range(devices)], strategy="STRICT_PACK")

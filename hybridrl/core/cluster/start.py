"""The start of Ray: join an existing one, or start one that only this user can reach."""

import logging
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import ray
import ray._private.ray_constants
import ray._private.utils
import ray._private.worker
import ray._raylet
from ray._raylet import Config

from hybridrl.config.findings import ConfigError
from hybridrl.runtime.environment import ray_token
from hybridrl.runtime.guard import REQUESTS
from hybridrl.runtime.keeper import PrivateDirectory

CONNECT_SECONDS = 10.0

logger = logging.getLogger(__name__)


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
        # From 2.60 on `ray start` requires the token it made, and ray.init does not send it by itself.
        send_token = vars(ray._private.worker).get("maybe_enable_token_auth_if_token_available")
        if send_token:
            send_token(warn_if_disabled=False)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray prints a page per dead actor; RemoteFailure names the actor and the cause if it matters.
    vars(ray._private.worker)["listen_error_messages"] = lambda *_: None
    vars(ray._private.utils)["set_sigterm_handler"] = lambda _: None  # a signal stops the run by name, also meanwhile
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
        REQUESTS.raise_again()
    except ConnectionError as error:
        raise ConfigError(
            f"no Ray responds at {address} (RAY_ADDRESS or ray_kwargs.ray_init.address)",
            fix="start it with ray start --head, or unset the address to have one started here",
        ) from error


@contextmanager
def _isolated(directory: PrivateDirectory) -> Iterator[None]:
    """Have a Ray that is started here use its private directory and listen on this machine's loopback only."""
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

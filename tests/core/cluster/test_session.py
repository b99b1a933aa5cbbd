"""A Ray started by a run: who can reach it, the loss of a component, and a killed driver."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
import ray

from hybridrl.core import device as devices
from hybridrl.core.cluster import Group, RaySession, WorkerDied, spawn
from hybridrl.required import required
from hybridrl.runtime.environment import worker_environment
from hybridrl.runtime.guard import begin_actor
from hybridrl.runtime.keeper import working_in

KILLED = """
import os, signal
from hybridrl.core.cluster import RaySession
print(RaySession("cpu", 1, 2, {}, 60).directory.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


class Worker:
    def __init__(self, log_file: str) -> None:
        begin_actor(log_file)

    def listen(self) -> int:
        address = ray.util.get_node_ip_address()
        listener = devices.listen(address)
        self.store = devices.open_store(f"{address}:{listener.getsockname()[1]}", listener, 1, 60)
        return os.getpid()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Placed:
    def gpus(self) -> tuple[list[str], str | None]:
        return [str(gpu) for gpu in ray.get_gpu_ids()], os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.slow
def test_each_rank_is_given_one_of_the_visible_gpus_and_its_engine_sees_them_all(monkeypatch):
    """Ray accepts the number of GPUs that it is started with. An engine gets the indices of its GPUs from its ranks."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    session = RaySession("cuda", 1, 2, {"num_gpus": 2}, 60)
    try:
        environment = worker_environment("cuda", 2)
        ranks = Group([spawn(Placed, session, rank, environment, gpus=1) for rank in range(2)], "rank", [])
        engines = Group([spawn(Placed, session, 0, environment)], "engine", [])
        assert sorted(gpus for gpus, _ in ranks.broadcast(Placed.gpus, timeout=200)) == [["4"], ["6"]]
        assert engines.broadcast(Placed.gpus, timeout=200) == [([], "4,6")]
    finally:
        session.close()


@pytest.fixture(scope="module")
def session() -> Iterator[RaySession]:
    """The last two tests have one session; its raylet is lost in the second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_RUNTIME_ENV_HOOK", "no.such.hook")  # Ray would import it
        session = RaySession("cpu", 1, 2, {}, 60)
        yield session
        session.close()
    assert not Path(required(session.directory).path).exists()


def listens(pid: int) -> list[str]:
    connections = psutil.Process(pid).net_connections("tcp")
    return [connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN]


@pytest.fixture
def occupied() -> Iterator[None]:
    """The ports that servers of this kind have by default are taken: Ray's, its dashboard's, torch's and vLLM's."""
    with ExitStack() as stack:
        for port in (6379, 8265, 10001, 29500, 8000):
            with suppress(OSError):  # another program has it
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
        yield


@pytest.mark.slow
def test_a_driver_killed_next_to_another_run_leaves_no_process_and_no_file(occupied, session, tmp_path):
    """Two runs side by side, where all default ports are taken: neither needs a fixed port, nor ends the other."""
    other = Group([spawn(Worker, session, 0, {}, str(tmp_path / "log"))], "worker", [])
    other.broadcast(Worker.listen, timeout=60)
    top = Path(__file__).parents[3]
    run = subprocess.run([sys.executable, "-c", KILLED], env=os.environ | {"PYTHONPATH": str(top)}, capture_output=True)
    assert run.returncode == -signal.SIGKILL
    directory = Path(run.stdout.decode().split()[-1])
    deadline = time.monotonic() + 20
    while directory.exists() or working_in(directory):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    other.broadcast(Worker.sleep, 0, timeout=20)


def test_only_the_owner_can_reach_its_ray_no_hook_is_used_and_a_lost_raylet_ends_all_waiting(session, tmp_path):
    workers = Group([spawn(Worker, session, 0, {}, str(tmp_path / "log"))], "worker", [])
    (worker,) = workers.broadcast(Worker.listen, timeout=60)
    assert "RAY_RUNTIME_ENV_HOOK" not in os.environ
    directory = Path(session.directory.path)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert (directory / "ray_token").stat().st_mode & 0o777 == 0o600
    listening = [address for pid in (*working_in(directory), os.getpid()) for address in listens(pid)]
    assert len(listening) > 5
    assert set(listening) <= {"127.0.0.1", "::ffff:127.0.0.1"}
    raylet = psutil.Process(worker).parent()
    calls = workers.start(Worker.sleep, 60)
    required(raylet).kill()
    began = time.monotonic()
    with pytest.raises(WorkerDied, match="Ray's raylet ended without a message, as if killed by hand"):
        workers.broadcast(Worker.sleep, 60, timeout=100)
    with pytest.raises(WorkerDied, match="Ray's raylet ended"):
        spawn(Worker, session, 0, {}, str(tmp_path / "log"))
    assert time.monotonic() - began < 20
    assert not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE
    del calls

"""Machines with addresses, names and tables of hosts of their own on this one: network namespaces on a bridge."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.core.cluster.machines import TOP

BRIDGE = f"hr{os.getpid() % 100_000}"
ENTER = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'
BIN = Path(sys.executable).parent


@dataclass
class Machine:
    """A namespace; `hosts` is its /etc/hosts."""

    number: int
    directory: Path
    processes: list[subprocess.Popen] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"node-{self.number}"

    @property
    def address(self) -> str:
        return f"10.77.0.{self.number}"

    @property
    def space(self) -> str:
        return f"{BRIDGE}-{self.number}"

    @property
    def hosts(self) -> Path:
        return self.directory / f"hosts-{self.number}"

    def command(self, *words: str) -> list[str]:
        """Return a command that runs on this machine."""
        inside = ["unshare", "--mount", "--uts", "bash", "-c", ENTER, str(self.hosts), self.name, *words]
        return ["ip", "netns", "exec", self.space, *inside]

    def start_ray(self, head: "Machine", prefix: Sequence[str] = (), seconds: float = 90, **variables: str) -> None:
        """Start Ray by a command with this prefix and environment, and wait for it."""
        place = ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={self.directory}/ray"]
        if self is not head:
            place = [f"--address={head.address}:6379"]
        options = ["--num-cpus=2", "--object-store-memory=100000000", "--disable-usage-stats", "--block"]
        words = [*prefix, str(BIN / "ray"), "start", *place, f"--node-ip-address={self.address}", *options]
        with (self.directory / f"{self.name}.log").open("w") as log:
            started = subprocess.Popen(self.command(*words), env=environment() | variables, stdout=log, stderr=log)
        self.processes.append(started)
        deadline, written = time.monotonic() + seconds, Path(log.name)
        while "Ray runtime started" not in written.read_text():
            assert time.monotonic() < deadline and started.poll() is None, written.read_text()
            time.sleep(0.2)


def environment() -> dict[str, str]:
    paths = {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": TOP}
    return {**os.environ, **paths, "RAY_AUTH_MODE": "disabled"}


def allowed() -> bool:
    """Whether this user may make namespaces here."""
    tools = all(map(shutil.which, ("ip", "unshare", "tc")))
    return (
        tools and not subprocess.run(["unshare", "--net", "--mount", "--uts", "true"], capture_output=True).returncode
    )


@contextmanager
def machines(count: int) -> Iterator[list[Machine]]:
    """Machines that reach each other by name; what runs on them ends with the block."""
    directory = Path(tempfile.mkdtemp(prefix="hr-", dir="/tmp"))  # Ray's sockets need a short path
    made = [Machine(number, directory) for number in range(1, count + 1)]
    table = "".join(f"{machine.address} {machine.name}\n" for machine in made)
    try:
        _run("link", "add", BRIDGE, "type", "bridge")
        _run("link", "set", BRIDGE, "up")
        for machine in made:
            machine.hosts.write_text(f"127.0.0.1 localhost\n{table}")
            _run("netns", "add", machine.space)
            _run("link", "add", machine.space, "type", "veth", "peer", "name", "eth0", "netns", machine.space)
            _run("link", "set", machine.space, "master", BRIDGE, "up")
            _run("-n", machine.space, "address", "add", f"{machine.address}/24", "dev", "eth0")
            for interface in ("eth0", "lo"):
                _run("-n", machine.space, "link", "set", interface, "up")
        yield made
    finally:
        for machine in made:
            _end(machine)
        for words in [*(["netns", "delete", machine.space] for machine in made), ["link", "delete", BRIDGE]]:
            subprocess.run(["ip", *words], capture_output=True)
        shutil.rmtree(directory, ignore_errors=True)


def _run(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _end(machine: Machine) -> None:
    listed = subprocess.run(["ip", "netns", "pids", machine.space], capture_output=True, text=True).stdout.split()
    subprocess.run(["kill", "-KILL", *listed], capture_output=True)
    for process in machine.processes:
        process.wait()


@contextmanager
def ray_machines(count: int) -> Iterator[list[Machine]]:
    """Machines with a Ray over all of them; the first is its head."""
    with machines(count) as made:
        for machine in made:
            machine.start_ray(made[0])
        yield made


def raylets(machine: Machine) -> Sequence[int]:
    """Return the processes of Ray's own daemon on a machine."""
    listed = subprocess.run(["ip", "netns", "pids", machine.space], capture_output=True, text=True).stdout.split()
    return [
        int(pid) for pid in listed if Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].endswith(b"/raylet")
    ]

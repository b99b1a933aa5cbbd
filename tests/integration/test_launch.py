"""Launches by Slurm and ssh on three hosts with addresses of their own, with real Ray and engines: network namespaces,
and programs in place of the scheduler."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from hybridrl.doctor.selftest_resume import MACHINE_METRICS
from hybridrl.launch.__main__ import main
from tests.launch.hosts import Cluster

pytestmark = pytest.mark.drill
HOSTS = ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
WAIT = 120
both = pytest.mark.parametrize("engine", ["slurm", "ssh"])


@pytest.fixture(scope="module")
def network() -> Iterator[str]:
    """Hosts that reach each other over a switch, and nothing else; the name before theirs."""
    prefix = f"launch{os.getpid()}-"
    switch, *_ = names = [f"{prefix}{name}" for name in ("switch", *HOSTS)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces are not allowed here: {error}")
    ip("-n", switch, "link", "add", "switch", "type", "bridge")
    ip("-n", switch, "link", "set", "switch", "up")
    for number, host in enumerate(HOSTS):
        ip("-n", switch, "link", "add", f"port{number}", "type", "veth", "peer", "name", "nic", "netns", prefix + host)
        ip("-n", switch, "link", "set", f"port{number}", "master", "switch", "up")
        ip("-n", prefix + host, "addr", "add", f"{host}/24", "dev", "nic")
        ip("-n", prefix + host, "link", "set", "nic", "up")
    yield prefix
    for name in names:
        ip("netns", "del", name)


@pytest.fixture(scope="module")
def bystanders(network: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[psutil.Process]]:
    """Another Ray of this user and two programs, on the first host."""
    enter, temporary = ["nsenter", f"--net=/run/netns/{network}{HOSTS[0]}"], tmp_path_factory.mktemp("ray")
    ray = ["ray", "start", "--head", "--port=6400", f"--temp-dir={temporary}", "--disable-usage-stats", "--block"]
    sleep = [sys.executable, "-c", "import time; time.sleep(10**6)"]
    started = [subprocess.Popen([*enter, *command], stdout=subprocess.DEVNULL) for command in (ray, sleep, sleep)]
    deadline = time.monotonic() + 60
    while not (temporary / "ray_current_cluster").exists():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    yield [found for process in started for found in family(process.pid)]
    for process in started:
        process.terminate()
        process.wait()


def family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


@pytest.fixture
def start(network, bystanders, overrides, tmp_path, started) -> Callable[..., tuple[Cluster, subprocess.Popen[str]]]:
    """Start a run of three steps, one device per host, by its file, which is written once per directory."""

    def run(
        engine: str, name: str, wait: int = WAIT, hosts: Sequence[str] = HOSTS, interface: str = "nic", **variables: str
    ) -> tuple[Cluster, subprocess.Popen[str]]:
        place = tmp_path / name
        again = place.exists()
        enter = ("nsenter", f"--net=/run/netns/{network}{HOSTS[0]}")
        cluster = Cluster(place / str(time.monotonic_ns()), ",".join(hosts), *enter, standins=False)
        cluster.run = place / "run"
        keys = {"trainer.total_training_steps": 3, "trainer.device": "cpu", "trainer.nnodes": len(HOSTS)}
        keys |= {
            "trainer.n_gpus_per_node": 1,
            "data.train_batch_size": 6,
            "trainer.rollout_data_dir": place / "samples",
        }
        keys |= {"actor_rollout_ref.actor.checkpoint.save_contents": "[model,optimizer,extra]"}
        (place / "hosts").write_text("\n".join(HOSTS))
        sizes = ["--nodes", str(len(HOSTS))] if engine == "slurm" else ["--hosts", str(place / "hosts")]
        options = {"gpus": 0, "interface": interface, "wait": wait, "out": place / engine}
        words = [engine, *sizes, *(f"--{name}={value}" for name, value in options.items())]
        if not again:
            assert main([*words, "--", *overrides(cluster.run, keys)]) == 0
        return cluster, cluster.start(place / engine, NAMESPACE=network, **variables)

    return run


def steps(directory: Path) -> dict[int, dict[str, float]]:
    """The metrics of each step, except those of time and memory."""
    lines = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    merged: dict[int, dict[str, float]] = {}
    for line in lines:
        merged.setdefault(line["step"], {}).update(line)
    return {
        step: {name: value for name, value in values.items() if not MACHINE_METRICS.search(name)}
        for step, values in merged.items()
        if step > 0
    }


def samples(directory: Path) -> list[str]:
    return [(directory / "samples" / f"{step}.jsonl").read_text() for step in (1, 2, 3)]


def wait_for_step(cluster: Cluster, process: subprocess.Popen[str], step: int) -> None:
    """Wait until a step is logged, so that the next one is running."""
    file, deadline = cluster.run / "metrics.jsonl", time.monotonic() + 600
    while not file.exists() or f'"step": {step}' not in file.read_text():
        assert process.poll() is None and time.monotonic() < deadline, cluster.output(process)
        time.sleep(0.05)


@pytest.fixture
def unbroken(start, tmp_path) -> Callable[[str], Path]:
    def run(engine: str) -> Path:
        cluster, process = start(engine, "unbroken")
        output = cluster.output(process, 900)
        assert process.returncode == 0, output
        assert cluster.left == []
        return tmp_path / "unbroken"

    return run


def assert_nothing_left(started: Callable[[], list[int]], bystanders: list[psutil.Process]) -> None:
    """No process of the launch after some seconds, and those of others as they were."""
    deadline = time.monotonic() + 20
    while started() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert [psutil.Process(pid).cmdline() for pid in started()] == []
    assert all(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in bystanders)


@both
def test_a_run_that_is_stopped_and_launched_again_ends_as_an_unbroken_one(
    engine, start, unbroken, bystanders, started, tmp_path
):
    whole = unbroken(engine)
    assert_nothing_left(started, bystanders)
    cluster, process = start(engine, "stopped", LATE=HOSTS[-1], DELAY="10")
    wait_for_step(cluster, process, 1)
    cluster.signal(process, signal.SIGTERM)
    output = cluster.output(process, 300)
    assert process.returncode == 130, output
    assert cluster.left == []
    assert_nothing_left(started, bystanders)
    cluster, process = start(engine, "stopped")
    output = cluster.output(process, 900)
    assert process.returncode == 0 and "resuming after step 2" in output, output
    assert steps(tmp_path / "stopped") == steps(whole) and samples(tmp_path / "stopped") == samples(whole)
    assert_nothing_left(started, bystanders)


def test_at_the_time_limit_a_run_is_requeued_and_finishes(start, bystanders, started):
    cluster, process = start("slurm", "limited")
    wait_for_step(cluster, process, 1)
    cluster.signal(process, signal.SIGUSR1)
    output = cluster.output(process, 900)
    assert (process.returncode, cluster.read("requeued")) == (0, "71\n"), output
    assert "resuming after step 2" in output and cluster.left == []
    assert_nothing_left(started, bystanders)


@both
def test_a_dead_host_is_named_within_the_time_to_wait(engine, start, bystanders, started):
    began = time.monotonic()
    cluster, process = start(engine, "dead", wait=30, DEAD=HOSTS[1])
    output = cluster.output(process, 300)
    assert process.returncode == 1 and time.monotonic() - began < 30 + 10, output
    assert [line for line in output.splitlines() if f"{HOSTS[1]} has not" in line and "No route to host" in line], (
        output
    )
    assert cluster.left == []
    assert_nothing_left(started, bystanders)


@both
def test_after_the_ray_of_a_host_is_killed_the_same_file_ends_as_an_unbroken_run(
    engine, start, unbroken, bystanders, started, tmp_path
):
    whole = unbroken(engine)
    cluster, process = start(engine, "killed")
    wait_for_step(cluster, process, 1)
    raylets = [psutil.Process(pid) for pid in started()]
    for raylet in raylets:
        if raylet.name() == "raylet" and f"--node_ip_address={HOSTS[2]}" in raylet.cmdline():
            raylet.kill()
    output = cluster.output(process, 300)
    assert process.returncode not in (0, 130) and cluster.left == [], output
    assert_nothing_left(started, bystanders)
    cluster, process = start(engine, "killed")
    output = cluster.output(process, 900)
    assert process.returncode == 0, output
    assert steps(tmp_path / "killed") == steps(whole) and samples(tmp_path / "killed") == samples(whole)
    assert_nothing_left(started, bystanders)


@both
@pytest.mark.parametrize(
    ("interface", "expected"),
    [
        ("nic9", r"this machine.* has no address nic9 to reach 10\.77\.0\.2: .*--interface names one of lo, nic"),
        ("lo", r"10\.77\.0\.[23] has not joined Ray; .*10\.77\.0\.[23]\.log ends with: "),
    ],
)
def test_a_wrong_interface_is_named(engine, interface, expected, start, bystanders, started):
    began = time.monotonic()
    cluster, process = start(engine, "wrong", wait=20, interface=interface)
    output = cluster.output(process, 300)
    assert process.returncode in (1, 2) and time.monotonic() - began < 20 + 20, output  # its Rays end, too
    assert re.search(expected, output), output
    assert cluster.left == []
    assert_nothing_left(started, bystanders)


def test_two_hosts_of_one_name_are_named(start, bystanders, started):
    cluster, process = start("slurm", "twice", hosts=[*HOSTS[:2], HOSTS[1]])
    output = cluster.output(process, 100)
    assert process.returncode == 1 and f"{HOSTS[1]} is in it more than once" in output, output
    assert cluster.left == []
    assert_nothing_left(started, bystanders)

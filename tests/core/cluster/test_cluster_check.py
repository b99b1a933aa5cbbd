"""`hybridrl doctor cluster` on machines with addresses of their own: sound, then with faults, each of which is named.

Here: a name that others cannot reach, ports that are blocked (by a `create_connection` that fails), a slow machine,
limits, a directory that is not shared, another environment, a Ray that was killed. In test_joined.py: other versions
and files, no collective. As facts, in tests/doctor: GPUs, CPUs and memory, clocks.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core.cluster.machines import TOP
from tests.core.cluster.namespaces import Machine, allowed, environment, ray_machines, raylets
from tests.core.cluster.namespaces import machines as namespaces

pytestmark = [pytest.mark.drill, pytest.mark.skipif(not allowed(), reason="no network namespaces here")]


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Machine]]:
    with ray_machines(3) as machines:
        yield machines


def doctor(machines: list[Machine], directory: Path, *words: str) -> tuple[int, dict[str, list[str]], list[str]]:
    """Run the check on the first machine; return its status, the causes of errors and warnings by code, and those of
    infos."""
    keys = ["trainer.device=cpu", "trainer.n_gpus_per_node=1", f"trainer.nnodes={len(machines)}"]
    keys += [f"trainer.default_local_dir={directory}/run"]
    command = machines[0].command(sys.executable, "-m", "hybridrl", "doctor", "cluster", "--json", *words, *keys)
    variables = environment() | {"RAY_ADDRESS": f"{machines[0].address}:6379"}
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200)
    print(ended.stderr)
    findings = json.loads(ended.stdout)["findings"]
    causes: dict[str, list[str]] = {}
    for finding in findings:
        if finding["severity"] != "info":
            assert finding["fix"]
            causes.setdefault(finding["code"], []).append(finding["cause"])
    return ended.returncode, causes, [finding["cause"] for finding in findings if finding["severity"] == "info"]


BLOCKED = """
import socket

connect = socket.create_connection

def create_connection(address, *rest, **options):
    if address[1] > 20000:
        raise OSError(113, "No route to host")
    return connect(address, *rest, **options)

socket.create_connection = create_connection
"""
LIMITED = 'ulimit -n 3000 && mount -t tmpfs -o size=200m x /dev/shm && mount -t tmpfs x "$0" && exec "$@"'


def test_every_fault_of_a_machine_is_named():
    """The first test: the machines of the others, which stay, have the same addresses."""
    with namespaces(2) as (first, second):
        shared, blocked = first.directory / "shared", first.directory / "blocked"
        shared.mkdir()
        blocked.mkdir()
        (blocked / "sitecustomize.py").write_text(BLOCKED)
        first.start_ray(first)
        other = {"HF_HOME": "/elsewhere", "PYTHONPATH": f"{blocked}:{TOP}"}
        second.start_ray(first, ["bash", "-c", LIMITED, str(shared)], **other)
        status, causes, _ = doctor([first, second], shared)
    assert status == 1
    for code, words in {
        "cluster.network": "cannot reach machine",
        "cluster.directory": "a file that the driver wrote is not visible",
        "cluster.limits": "open files",
        "cluster.free": "/dev/shm",
        "cluster.environment": "HF_HOME differs: ",
    }.items():
        assert any(words in cause and "node-2 (10.77.0.2)" in cause for cause in causes[code]), causes


def test_a_sound_cluster_has_no_finding_and_its_placement_is_shown(machines, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"{machine.name}\n" for machine in machines))
    status, causes, infos = doctor(machines, tmp_path, "--hosts", str(hosts))
    assert (status, causes) == (0, {})
    text = "\n".join(infos)
    for machine in machines:
        place = rf"machine (\d) on {machine.name} \({machine.address}\); device 0: train-\1 rollout-\1"
        assert re.search(place, text)
    assert "GB/s" in text and "10.77.0.3 on eth0" in text


def test_a_host_that_does_not_join_is_named_with_its_last_line(machines, tmp_path):
    (tmp_path / "hosts").write_text("node-1\nnode-2\nnode-3\nnode-4\n")
    (tmp_path / "node-4.log").write_text("ray start: no interface ib7\n")
    words = ["--wait", "3", "--hosts", f"{tmp_path}/hosts", "--logs", str(tmp_path)]
    status, causes, _ = doctor(machines, tmp_path, *words)
    cause = f"node-4 has not joined Ray; {tmp_path}/node-4.log ends with: ray start: no interface ib7"
    assert (status, causes) == (1, {"cluster.missing": [cause]})


def test_a_slow_machine_is_named_by_its_links(machines, tmp_path):
    limit = ["dev", "eth0", "root", "tbf", "rate", "200mbit", "burst", "128kbit", "latency", "50ms"]
    enter = ["ip", "netns", "exec", machines[2].space, "tc", "qdisc"]
    subprocess.run([*enter, "add", *limit], check=True)
    try:
        status, causes, _ = doctor(machines, tmp_path)
    finally:
        subprocess.run([*enter, "delete", "dev", "eth0", "root"], check=True)
    assert status == 0 and {*causes} == {"cluster.link"}
    assert len(causes["cluster.link"]) == 2 and all("node-3" in cause for cause in causes["cluster.link"])


def test_a_machine_whose_name_is_an_address_of_the_loopback_is_named(machines, tmp_path):
    table = machines[1].hosts.read_text()
    machines[1].hosts.write_text(f"127.0.1.1 node-2\n{table}")
    try:
        status, causes, _ = doctor(machines, tmp_path)
    finally:
        machines[1].hosts.write_text(table)
    assert status == 1 and len(causes["cluster.address"]) == 1
    assert "node-2" in causes["cluster.address"][0] and "127.0.1.1" in causes["cluster.address"][0]


def test_a_machine_whose_ray_was_killed_is_named(machines, tmp_path):
    """The last test, as the machine does not come back."""
    for pid in raylets(machines[1]):
        os.kill(pid, signal.SIGKILL)
    _, causes, _ = doctor(machines[:2], tmp_path)
    named = [code for code, texts in causes.items() for text in texts if "node-2 (10.77.0.2)" in text]
    assert {*named} & {"cluster.start", "cluster.dead"}, causes

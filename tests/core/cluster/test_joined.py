"""A Ray that is joined: what a run waits for, what its machines must have in common, and what a killed driver leaves.

The machines of this Ray are all on this one.
"""

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from hybridrl.config import ConfigError
from hybridrl.core.cluster import RaySession, session
from hybridrl.core.cluster.session import RayMachine, describe_room, existing_ray, missing_machines, request_of
from hybridrl.doctor.__main__ import main
from hybridrl.doctor.cluster import describe_reservations, probe_run, probe_session
from tests.core.cluster.machines import TOP, two_machines

KILLED = """
import os, signal, ray
from hybridrl.core.cluster import Group, RaySession, spawn

class Worker:
    def pid(self):
        return os.getpid()

session = RaySession("cpu", 1, 2, {}, 60)
workers = Group([spawn(Worker, session, rank, {}) for rank in range(2)], "worker", [])
print(*workers.broadcast(Worker.pid, timeout=100), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_machine_that_is_missing_is_named_with_what_the_others_have():
    busy = RayMachine("node-a (10.0.0.1)", "1", total={"GPU": 8, "CPU": 64}, free={"GPU": 3, "CPU": 60})
    small = RayMachine("n (10.0.0.2)", "2", total={"CPU": 4}, free={"CPU": 4})
    request = request_of("cuda", 8)
    assert describe_room([busy, small], request) == [
        "node-a (10.0.0.1)  GPUs: 8 requested, 8 in total, 3 free; CPUs: 8 requested, 64 in total, 60 free",
        "n (10.0.0.2)       GPUs: 8 requested, 0 in total, 0 free; CPUs: 8 requested, 4 in total, 4 free",
    ]
    missing = ["machine 2 of 3 is missing", "machine 3 of 3 is missing"]
    assert missing_machines([busy, small], request, 3) == missing


def test_metrics_of_a_run_are_set_among_those_of_ray(monkeypatch):
    made = []

    class Gauge:
        def __init__(self, name, description, tag_keys):
            made.append(self)
            self.name, self.tag_keys, self.values = name, tag_keys, {}

        def set_default_tags(self, tags):
            self.tags = tags

        def set(self, value, tags):
            self.values[tags["metric"]] = value

    monkeypatch.setattr(session, "Gauge", Gauge)
    sink = session.RayMetricsSink("sums", "first")
    sink.log(3, {"actor/entropy": 0.25, "undefined": math.nan})
    sink.log(4, {"actor/entropy": 0.125})
    (gauge,) = made
    assert gauge.values == {"training/global_step": 4.0, "actor/entropy": 0.125}
    assert gauge.name == "hybridrl_metric" and gauge.tags == {"project": "sums", "experiment": "first"}


def test_without_a_cluster_the_doctor_says_how_to_start_one(capsys, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(["cluster"]) == 1
    said = capsys.readouterr().out
    assert "ray start --head" in said and "ray start --address=" in said and "RAY_ADDRESS=" in said


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with two_machines() as cluster:
        yield cluster


@pytest.mark.drill
def test_a_run_waits_for_its_machines_says_what_it_waits_for_and_releases_them(cluster, capsys):
    with pytest.raises(
        ConfigError, match=r"no room within 1 s for trainer.nnodes=3 x trainer.n_gpus_per_node=4 on cpu"
    ):
        RaySession("cpu", 3, 4, {}, 1)
    said = capsys.readouterr().out
    assert "waiting for Ray, up to trainer.startup_timeout=1 s: 2 of 3 machine(s) reserved, 2 in Ray:\n" in said
    assert said.count("  CPUs: 0.04 requested, 2 in total, 1.96 free\n") == 2
    assert f"  machine 3 of 3 is missing\n  to add a machine: ray start --address={cluster.address}" in said
    session = RaySession("cpu", 2, 3, {}, 60)
    groups = [ray.util.placement_group_table(group) for group in session.groups.values()]
    nodes = [set(group["bundles_to_node_id"].values()) for group in groups]
    assert [len(of_group) for of_group in nodes] == [1, 1] and nodes[0] != nodes[1]
    session.close()
    assert_free(4)


@pytest.mark.drill
def test_rollout_gets_machines_of_its_own_if_there_are_any_and_shares_the_cores_of_the_others(cluster):
    for wide, machines in ((1, [0, 1]), (2, [0, 1])):
        session = RaySession("cpu", 1, 1, {}, 60, rollout=(wide, 2))
        assert session.first_devices == machines and len(session.nodes) == 1 + wide
        assert session.nodes[0] != session.nodes[1], "training is on the first machine, rollout begins on the other"
        assert session.sharing(0) == (1 if wide == 1 else 3) and session.sharing(1) == 2
        assert [session.bundle(device)[1] for device in range(1 + 2 * wide)] == [0, *[0, 1] * wide]
        session.close()
    assert_free(4)


@pytest.mark.drill
def test_the_actors_of_a_killed_driver_end_and_its_devices_are_free(cluster):
    run = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True)
    assert run.returncode == -signal.SIGKILL
    workers, deadline = [int(pid) for pid in run.stdout.split()[-2:]], time.monotonic() + 30
    while any(psutil.pid_exists(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert_free(4)


def assert_free(cpus: int) -> None:
    """Every CPU of the cluster is free, and no reservation is left."""
    with existing_ray({}):
        deadline = time.monotonic() + 30
        while ray.available_resources().get("CPU") != cpus:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert {group["state"] for group in ray.util.placement_group_table().values()} <= {"REMOVED"}


@pytest.mark.drill
def test_equal_machines_pass_and_leave_no_file(cluster, tmp_path):
    cluster.add_node(num_cpus=2)  # a third machine, as of two there is only one pair
    session = RaySession("cpu", 3, 1, {}, 100)
    try:
        findings = probe_session(session, tmp_path, {})
    finally:
        session.close()
    assert findings.errors == []
    (table,) = [finding.cause for finding in findings.items if finding.code == "cluster.facts"]
    assert table.startswith("driver, machine 0 (") and "!" not in table
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


class OfEachMachine(str):
    """A path that leads elsewhere on a machine with the variable MODEL."""

    def __reduce__(self):
        return os.getenv, ("MODEL", str(self))


@pytest.mark.drill
def test_the_doctor_shows_the_same_without_a_run(cluster, tmp_path, capsys):
    keys = ["trainer.device=cpu", "trainer.n_gpus_per_node=1", f"trainer.default_local_dir={tmp_path}/run"]
    assert main(["cluster", *keys]) == 0
    said = capsys.readouterr().out
    assert said.count("CPUs: 0.01 requested, 2 in total, 2 free") == 3
    assert f"to add a machine: ray start --address={cluster.address}" in said
    assert "driver, machine 0 (" in said and "no errors" in said
    session = RaySession("cpu", 1, 1, {}, 60)
    try:
        assert describe_reservations() == [
            f"hybridrl: process {os.getpid()} on {socket.gethostname()}, machine 0: created, 1 device(s)"
        ]
    finally:
        session.close()
    assert main(["cluster", *keys, "trainer.nnodes=4"]) == 1
    assert "machine 4 of 4 is missing" in capsys.readouterr().out


@pytest.mark.drill
def test_a_machine_that_differs_is_named_with_what_differs(cluster, tmp_path, capsys):
    """The last test, as the machine stays: it has an older transformers, another model, and no network interface."""
    model, other = tmp_path / "model", tmp_path / "other"
    for directory, content in ((model, "{}"), (other, '{"model_type": "qwen2"}')):
        directory.mkdir()
        (directory / "config.json").write_text(content)
    (other / "transformers-4.1.dist-info").mkdir()
    (other / "transformers-4.1.dist-info" / "METADATA").write_text("Name: transformers\nVersion: 4.1\n")
    path = os.pathsep.join([str(other), TOP])
    variables = {"MODEL": str(other), "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "none0", "HF_HOME": "/other"}
    cluster.add_node(num_cpus=2, env_vars=variables)
    session = RaySession("cpu", 4, 1, {}, 100)
    try:
        with pytest.raises(ConfigError) as rejected:
            probe_run(session, tmp_path, {"model": {"path": OfEachMachine(model)}})
    finally:
        session.close()
    said = capsys.readouterr().out
    assert "! transformers" in said and "HF_HOME differs: " in said and "; /other on machine " in said
    causes = {finding.code: finding.cause for finding in rejected.value.findings}
    assert sorted(causes) == ["cluster.network", "cluster.paths", "cluster.versions"]
    assert "4.1 on machine " in causes["cluster.versions"]
    assert causes["cluster.paths"].startswith(f"model.path={model} has different contents: ")
    assert "no all-reduce with machine " in causes["cluster.network"]
    assert "Unable to find address for: none0" in causes["cluster.network"]

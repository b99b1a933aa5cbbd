"""Hosts that are expected, and the nodes of Ray that joined; what a run lacks on them. Without Ray."""

import itertools
import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from hybridrl.config import ConfigError, PPOConfig
from hybridrl.config.findings import Findings
from hybridrl.core.cluster.session import RayMachine, RayNode
from hybridrl.doctor import joining, read_hosts
from hybridrl.doctor.__main__ import main
from hybridrl.doctor.joining import check_hosts, check_room, missing_hosts, wait_until
from tests.doctor.conftest import config_in

A, B = (RayNode(f"node-{letter}", f"10.0.0.{number}", f"10.0.0.{number}", True, 5.0) for letter, number in ("a1", "b2"))
GIB = 1 << 30


def reports(hosts: list[str], nodes: list[RayNode], logs: Path | None = None) -> list[tuple[str, str]]:
    findings = Findings()
    check_hosts(hosts, nodes, logs, findings)
    return [(one.code, one.cause) for one in findings.items]


@pytest.mark.parametrize(
    "hosts", [["node-a", "node-b"], ["10.0.0.1", "10.0.0.2"], ["node-a.cluster.local", "10.0.0.2"]]
)
def test_hosts_that_have_joined_by_name_or_address_are_not_reported(hosts: list[str]):
    assert missing_hosts(hosts, [A, B]) == [] == reports(hosts, [A, B])


def test_a_host_that_has_not_joined_is_named_with_the_last_line_of_its_log(tmp_path: Path):
    (tmp_path / "node-b.log").write_text("starting\n  Unable to connect to GCS at 10.0.0.1:6379  \n\n")
    cause = f"node-b has not joined Ray; {tmp_path}/node-b.log ends with: Unable to connect to GCS at 10.0.0.1:6379"
    assert reports(["node-a", "node-b"], [A], tmp_path) == [("cluster.missing", cause)]
    assert reports(["node-a", "node-c"], [A], tmp_path)[0][1].endswith(f"there is nothing in {tmp_path}/node-c.log")


def test_a_host_that_joined_and_died_is_named_with_its_address_and_the_reason():
    bridge = replace(
        B, address="172.17.0.1", label="172.17.0.1", alive=False, seconds=12.4, reason="health check failed"
    )
    cause = "node-b joined Ray as 172.17.0.1 and died 12 s ago (health check failed); no --logs are named"
    assert reports(["node-a", "node-b"], [A, bridge]) == [("cluster.missing", cause)]


def test_a_dead_node_is_reported_unless_its_machine_has_joined_again():
    dead = replace(B, alive=False, seconds=40.0)
    ((code, cause),) = reports([], [A, dead])
    assert (
        code == "cluster.dead"
        and cause == "node-b (10.0.0.2) joined Ray as 10.0.0.2 and died 40 s ago (no reason known)"
    )
    assert reports([], [A, dead, B]) == [] == reports(["node-a", "node-b"], [A, dead, B])


def test_two_machines_with_one_name_one_with_two_and_one_with_two_rays_are_named():
    other = replace(B, host="node-a")
    ((code, cause),) = reports(["node-a"], [A, other])
    assert code == "cluster.twice" and cause == "node-a is in Ray 2 times, as node-a (10.0.0.1), node-a (10.0.0.2)"
    assert reports(["node-a", "10.0.0.1"], [A]) == [
        ("cluster.twice", "node-a and 10.0.0.1 are one machine in Ray, node-a (10.0.0.1)")
    ]
    assert [code for code, _ in reports(["10.0.0.1"], [A, replace(A, seconds=3600.0)])] == ["cluster.twice"]


def test_a_node_that_is_not_expected_may_be_of_another_cluster():
    ((code, cause),) = reports(["node-b"], [A, B])
    assert (
        code == "cluster.unexpected" and cause == "node-a (10.0.0.1) joined this Ray 5 s ago and is not among the hosts"
    )


def test_nodes_that_were_started_with_a_name_are_hosts_of_that_name():
    """Nodes of one machine, whose host name they share."""
    nodes = [replace(A, host="vm", label="first"), replace(B, host="vm", label="second")]
    assert reports(["first", "second"], nodes) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a\nb\na\n", "a is in it more than once"),
        (" \n# a", "it names no host"),
        ("a b\n", "'a b' is not a name or an address"),
        (None, "cannot be read"),
    ],
)
def test_a_file_of_hosts_names_each_once(tmp_path: Path, text: str | None, problem: str):
    file = tmp_path / "hosts"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_hosts(file)
    file.write_text("a # the first\nfd00::2\n\n")
    assert read_hosts(file) == ["a", "fd00::2"]


def test_waiting_says_what_is_missing_once_and_ends_when_all_is_there_or_at_the_limit(monkeypatch, capsys):
    clock = itertools.count(0.0)
    monkeypatch.setattr(joining.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(joining.time, "sleep", lambda seconds: None)
    states = iter([["b", "c"], ["b", "c"], ["c"], []])
    assert wait_until(lambda: next(states), 10)
    assert capsys.readouterr().out.splitlines() == ["waiting up to 10 s for b, c", "waiting up to 8 s for c"]
    assert not wait_until(lambda: ["c"], 6)


@pytest.fixture
def config(tmp_path: Path) -> PPOConfig:
    config = config_in(tmp_path)
    config.trainer.n_gpus_per_node = 2
    return config


def test_hosts_are_named_with_their_logs_if_no_ray_responds(tmp_path: Path, monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    (tmp_path / "hosts").write_text("first\nsecond\n")
    (tmp_path / "first.log").write_text("ray: command not found\n")
    words = ["--wait", "0.1", "--hosts", f"{tmp_path}/hosts", "--logs", str(tmp_path), "--json", "trainer.device=cpu"]
    assert main(["cluster", *words]) == 1
    output = capsys.readouterr()
    assert f"waiting up to 0 s for Ray at 127.0.0.1:{port}" in output.err
    causes = [finding["cause"] for finding in json.loads(output.out)["findings"]]
    assert causes[:2] == [
        f"first has not joined Ray; {tmp_path}/first.log ends with: ray: command not found",
        f"second has not joined Ray; there is nothing in {tmp_path}/second.log",
    ]
    assert causes[2].startswith(f"no Ray responds at 127.0.0.1:{port}") and len(causes) == 3


def machine(name: str, **resources: float) -> RayMachine:
    total = {"CPU": 4.0, "memory": 8.0 * GIB, "object_store_memory": 8.0 * GIB} | resources
    return RayMachine(name, name, total, total)


def room(config: PPOConfig, *machines: RayMachine) -> list[tuple[str, str]]:
    findings = Findings()
    check_room(config, machines, [], findings)
    return [(one.code, one.cause) for one in findings.items if one.severity != "info"]


def test_a_machine_with_too_little_for_its_devices_is_named_with_what_it_lacks(config: PPOConfig):
    assert room(config, machine("a"), machine("b")) == []
    assert room(config, machine("a"), machine("b", CPU=1)) == [("cluster.room", "b has 1 of 2 CPU for its CPU devices")]
    assert room(config, machine("b", memory=1 * GIB))[0][1].startswith("b has 1 of 3 GiB of memory for its CPU")
    config.trainer.nnodes = 2
    assert room(config, machine("a"), machine("b", CPU=0)) == [
        ("cluster.room", "machine 2 of 2 is missing; b has 0 of 0.02 CPU")
    ]


def test_an_object_store_that_is_smaller_than_the_rows_of_a_step_is_named(config: PPOConfig):
    config.actor_rollout_ref.rollout.max_model_len = 1 << 20  # 40 bytes per token
    rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n * 40 / 1024
    ((code, cause),) = room(config, machine("a", object_store_memory=rows * GIB), machine("b", object_store_memory=GIB))
    assert code == "cluster.store" and cause.startswith(f"b has 1 of {rows:.3g} GiB of object_store_memory")

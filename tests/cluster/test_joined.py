"""A Ray that is joined: what a run waits for, what it releases, and what a killed driver leaves."""

import pytest
import ray

from hybridrl.cluster import RaySession
from hybridrl.cluster.session import Machine, bundle_of, describe_room, joined
from hybridrl.config import ConfigError

GPU = bundle_of("cuda")


def test_a_machine_that_is_missing_is_named_with_what_the_others_have():
    busy = Machine("node-a (10.0.0.1)", "1", total={"GPU": 8, "CPU": 64}, free={"GPU": 3, "CPU": 60})
    small = Machine("n (10.0.0.2)", "2", total={"CPU": 4}, free={"CPU": 4})
    assert describe_room([busy, small], {name: 8 * amount for name, amount in GPU.items()}, 3, 1).splitlines() == [
        "1 of 3 machine(s) reserved, 2 in Ray:",
        "  node-a (10.0.0.1)  GPUs: 8 requested, 8 in total, 3 free; CPUs: 8 requested, 64 in total, 60 free",
        "  n (10.0.0.2)       GPUs: 8 requested, 0 in total, 0 free; CPUs: 8 requested, 4 in total, 4 free",
        "  machine 2 of 3 is missing",
        "  machine 3 of 3 is missing",
    ]


@pytest.mark.slow
def test_a_run_waits_for_its_machines_says_what_it_waits_for_and_releases_them(ray_cluster, capsys):
    with pytest.raises(
        ConfigError, match=r"no room within 1 s for trainer.nnodes=3 x trainer.n_gpus_per_node=4 on cpu"
    ):
        RaySession("cpu", 3, 4, {}, 1)
    said = capsys.readouterr().out
    assert "waiting for Ray, up to trainer.startup_timeout=1 s: 2 of 3 machine(s) reserved, 2 in Ray:\n" in said
    assert said.count("  CPUs: 0.04 requested, 2 in total, 1.96 free\n") == 2
    assert f"  machine 3 of 3 is missing\n  to add a machine: ray start --address={ray_cluster.address}" in said
    session = RaySession("cpu", 2, 3, {}, 60)
    groups = [ray.util.placement_group_table(group) for group in session.groups]
    nodes = [set(group["bundles_to_node_id"].values()) for group in groups]
    assert [len(of_group) for of_group in nodes] == [1, 1] and nodes[0] != nodes[1]
    session.close()
    with joined({}):
        states = {group["state"] for group in ray.util.placement_group_table().values()}
        assert states == {"REMOVED"} and ray.available_resources()["CPU"] == 4

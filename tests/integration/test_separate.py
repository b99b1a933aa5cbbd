"""Rollout on devices of its own, in whole runs: what a bound of zero equals, and what is left when a process dies."""

import json
import random
from collections import Counter

import psutil
import pytest

from hybridrl.runs.directory import RunDirectory
from tests.core.cluster.machines import two_machines
from tests.integration.test_resume import compared_metrics, kill_in_step
from tests.integration.test_run import assert_gone, finish, metrics, start, wait_for_step

SEPARATE = {
    "trainer.v1.trainer_mode": "separate_async",
    "trainer.n_gpus_per_node": 1,
    "actor_rollout_ref.rollout.n_gpus_per_node": 1,
}

pytestmark = pytest.mark.slow


@pytest.mark.drill
def test_with_a_threshold_of_zero_a_run_on_two_machines_is_the_one_on_shared_devices(overrides, tmp_path):
    steps = {"trainer.total_training_steps": 3}
    finish(start("main_ppo", overrides(tmp_path / "shared", steps | {"trainer.n_gpus_per_node": 1})))
    bound = {"trainer.v1.sampler.max_off_policy_threshold": 0}
    with two_machines(node_ip_address="127.0.0.2"):  # each device has the cores for itself, as the shared one has
        output = finish(start("main_ppo", overrides(tmp_path / "separate", steps | SEPARATE | bound)))
    placed = [row for row in RunDirectory(tmp_path / "separate").placement if row[1]]
    assert [processes for _, _, processes in placed] == ["train-0", "rollout-0"]
    assert len({machine.partition(" on ")[2] for machine, _, _ in placed}) == 2
    assert all(f"{machine}; device 0: {processes}" in output for machine, _, processes in placed)
    expected, measured = compared_metrics(tmp_path / "shared"), compared_metrics(tmp_path / "separate")
    for step, values in expected.items():
        both = values.keys() & measured[step].keys()
        assert len(both) > 50
        assert {name: measured[step][name] for name in both} == {name: values[name] for name in both}


def test_a_rollout_server_and_a_training_rank_die_and_no_sample_is_lost(overrides, tmp_path):
    more = {"trainer.total_training_steps": 20, "trainer.save_freq": 1, "trainer.max_restarts": 1}
    process, generator = start("main_ppo", overrides(tmp_path, more | SEPARATE)), random.Random(0)
    wait_for_step(process, tmp_path, 2)
    processes = psutil.Process(process.pid).children(recursive=True)
    kill_in_step(process, "TrainWorker", tmp_path, 3, generator)
    wait_for_step(process, tmp_path, 12)
    kill_in_step(process, "RolloutServer", tmp_path, 13, generator)
    output = finish(process)
    assert "restarting the workers from the last checkpoint" in output
    assert_gone(processes)
    assert max(one.get("rollout/engine_restarts", 0) for one in metrics(tmp_path).values()) == 1
    episodes = [
        json.loads(line)["episode"]
        for step in range(1, 21)
        for line in (tmp_path / "rollouts" / f"{step}.jsonl").read_text().splitlines()
    ]
    counts = Counter((episode["position"], episode["sample"]) for episode in episodes)
    assert set(counts.values()) == {1} and len(counts) == 20 * 32

"""Placement of a run's processes, by the groups of devices that a session has reserved; without Ray."""

from pathlib import Path

from hybridrl.config import PPOConfig
from hybridrl.core.cluster.session import RayMachine
from hybridrl.runs.directory import RunDirectory
from hybridrl.runs.placement import describe, expected_groups, place_processes, write_placement
from tests.doctor.conftest import config_in

A, B = (RayMachine(f"node-{name} (10.0.0.{name})", name, {"CPU": 4, "GPU": 4}, {}) for name in "12")


def run_with(directory: Path, **trainer: object) -> PPOConfig:
    config = config_in(directory)
    config.reward.num_workers = 3
    for name, value in trainer.items():
        setattr(config.trainer, name, value)
    return config


def test_ranks_servers_scorers_and_episode_processes_are_shown_by_machine_and_device(tmp_path: Path):
    config = run_with(tmp_path, nnodes=2, n_gpus_per_node=2)
    config.actor_rollout_ref.rollout.tensor_model_parallel_size = 2
    config.actor_rollout_ref.rollout.agent.num_workers = 3
    machines = place_processes([(A, 2), (B, 2)], config, episodes=True)
    assert describe(machines).splitlines() == [
        "machine 0 on node-1 (10.0.0.1); device 0: train-0 rollout-0; device 1: train-1 rollout-0; "
        "scoring-0 (processes: 2) episodes-0 episodes-2",
        "machine 1 on node-2 (10.0.0.2); device 0: train-2 rollout-1; device 1: train-3 rollout-1; "
        "scoring-1 (processes: 1) episodes-1",
    ]
    write_placement(machines, tmp_path)
    assert RunDirectory(tmp_path).placement[:3] == [
        ("machine 0 on node-1 (10.0.0.1)", "device 0", "train-0 rollout-0"),
        ("machine 0 on node-1 (10.0.0.1)", "device 1", "train-1 rollout-0"),
        ("machine 0 on node-1 (10.0.0.1)", "", "scoring-0 (processes: 2) episodes-0 episodes-2"),
    ]


def test_two_machines_of_a_run_on_one_node_are_seen(tmp_path: Path):
    config = run_with(tmp_path, nnodes=2, n_gpus_per_node=1)
    lines = describe(place_processes([(A, 1), (A, 1)], config, episodes=False)).splitlines()
    assert lines == [
        "machine 0 on node-1 (10.0.0.1); device 0: train-0 rollout-0; scoring-0 (processes: 3)",
        "machine 1 on node-1 (10.0.0.1); device 0: train-1 rollout-1",
    ]


def test_servers_with_machines_for_themselves_come_after_the_ranks(tmp_path: Path):
    config = run_with(tmp_path, nnodes=1, n_gpus_per_node=1)
    config.trainer.v1.trainer_mode = "separate_async"
    machines = place_processes([(A, 1), (B, 2)], config, episodes=False)
    assert [machine.devices for machine in machines] == [[["train-0"]], [["rollout-0"], ["rollout-1"]]]


def test_a_group_is_expected_on_the_machine_with_the_fewest_that_has_room():
    names = [
        [machine.node_id for machine, _ in expected_groups([A, B], "cuda", sizes)] for sizes in ([4, 4], [2, 2, 2, 2])
    ]
    assert names == [["1", "2"], ["1", "2", "1", "2"]]
    assert expected_groups([A, B], "cuda", [4, 4, 1]) == [] == expected_groups([], "cpu", [1])


def test_a_run_without_a_placement_has_none_and_a_damaged_file_is_noted(tmp_path: Path):
    notes = []
    assert RunDirectory(tmp_path).placement == []
    (tmp_path / "placement.json").write_text("[{}]")
    assert (
        RunDirectory(tmp_path, lambda text, code: notes.append(text)).placement == [] and "placement.json" in notes[0]
    )

"""Invariant 4: a run that is killed repeatedly ends as one that never was."""

import json
import random
import time
from pathlib import Path

import psutil
import pytest
import torch

from hybridrl.checkpoint.read import read_shards
from hybridrl.doctor.selftest_resume import MACHINE_METRICS
from hybridrl.required import required
from tests.integration.test_engine import command
from tests.integration.test_run import assert_gone, driver_of, finish, metrics, start, wait_for_step

pytestmark = pytest.mark.slow

STEPS = 6


@pytest.fixture(scope="module")
def arguments(overrides):
    def build(directory: Path) -> list[str]:
        more = {
            "trainer.n_gpus_per_node": 1,
            "trainer.total_training_steps": STEPS,
            "trainer.save_freq": 1,
            "trainer.max_actor_ckpt_to_keep": 2,
            "trainer.rollout_data_dir": directory / "samples",
            "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
            "actor_rollout_ref.actor.checkpoint.save_contents": "[model,optimizer,extra]",
            "data.train_max_samples": 12,  # epochs begin within steps
            "data.curriculum": "medium",
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_ctrl.type": "adaptive",
        }
        return overrides(directory, more)

    return build


def compared_metrics(directory: Path) -> dict[int, dict[str, float]]:
    """Return each step's metrics except those of time and memory, and of lost engines."""
    return {
        step: {name: value for name, value in values.items() if not MACHINE_METRICS.search(name)}
        for step, values in metrics(directory).items()
        if step > 0
    }


def weights_and_moments(directory: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    saved = read_shards(directory / f"global_step_{step}" / "actor", section="")
    assert any("exp_avg_sq" in name for name in saved.meta)
    return {name: saved.read(name) for name in saved.meta}


def victim(process, kind: str) -> psutil.Process:
    driver = driver_of(process)
    if kind == "driver":
        return driver
    return next(p for p in required(driver.parent()).children(recursive=True) if kind in command(p))


def kill_in_step(process, kind: str, directory: Path, step: int, generator: random.Random) -> None:
    """Kill a process of a run at a random moment after a step has been logged."""
    wait_for_step(process, directory, step)
    time.sleep(generator.uniform(0, 1))
    victim(process, kind).kill()


def test_a_run_killed_three_times_ends_as_one_that_never_was(arguments, tmp_path):
    unbroken, killed = tmp_path / "unbroken", tmp_path / "killed"
    undisturbed, generator = start("main_ppo", arguments(unbroken)), random.Random(4)
    for step in (1, 2):
        process = start("main_ppo", arguments(killed))
        wait_for_step(process, killed, step)
        processes = psutil.Process(process.pid).children(recursive=True)
        kill_in_step(process, "driver", killed, step, generator)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 137, output
        assert_gone(processes)
    finish(undisturbed)
    process = start("main_ppo", [*arguments(killed), "trainer.max_restarts=1"])
    kill_in_step(process, "TrainWorker", killed, 4, generator)
    output = finish(process)
    assert output.count("resuming after step") == 2 and "(restarts left: 0)" in output
    assert compared_metrics(killed) == compared_metrics(unbroken)
    lines = [json.loads(line)["step"] for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(lines)) == [*range(STEPS + 1)]
    for step in range(1, STEPS + 1):
        assert (killed / "samples" / f"{step}.jsonl").read_text() == (
            unbroken / "samples" / f"{step}.jsonl"
        ).read_text()
    resumed, expected = weights_and_moments(killed), weights_and_moments(unbroken)
    assert resumed.keys() == expected.keys()
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)
    steps = sorted(path.name for path in killed.glob("global_step_*"))
    assert steps == [f"global_step_{STEPS - 1}", f"global_step_{STEPS}"]
    again = finish(start("main_ppo", arguments(killed)))
    assert f"the run is complete: {STEPS} of {STEPS} steps are done" in again

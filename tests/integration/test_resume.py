"""Invariant 4: a run that was killed, again and again, ends as one that never was."""

import json
import random
import time
from pathlib import Path

import psutil
import pytest
import torch

from hybridrl.checkpoint.read import read_shards
from tests.integration.test_run import assert_gone, driver_of, finish, metrics, start, wait_for_step

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
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_ctrl.type": "adaptive",
        }
        return overrides(directory, more)

    return build


def told(directory: Path) -> dict[int, dict[str, float]]:
    """All metrics of each step but those of clocks and memory, and of engines that were lost."""
    own = ("timing", "perf/", "rollout/")
    return {
        step: {name: value for name, value in values.items() if not name.startswith(own)}
        for step, values in metrics(directory).items()
        if step > 0
    }


def weights_and_moments(directory: Path) -> dict[str, torch.Tensor]:
    saved = read_shards(directory / f"global_step_{STEPS}" / "actor", section="")
    assert any("exp_avg_sq" in name for name in saved.meta)
    return {name: saved.read(name) for name in saved.meta}


def victim(process, kind: str) -> psutil.Process:
    driver = driver_of(process)
    if kind == "driver":
        return driver
    return next(p for p in driver.parent().children(recursive=True) if kind in " ".join(p.cmdline()))


def kill_in_step(process, kind: str, directory: Path, step: int, draw: random.Random) -> None:
    """Kill a process of a run at some moment after a step has been told of."""
    wait_for_step(process, directory, step)
    time.sleep(draw.uniform(0, 1))
    victim(process, kind).kill()


def test_a_run_killed_three_times_ends_as_one_that_never_was(arguments, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    left_alone, draw = start("main_ppo", arguments(whole)), random.Random(4)
    for step in (1, 2):
        process = start("main_ppo", arguments(killed))
        wait_for_step(process, killed, step)
        processes = psutil.Process(process.pid).children(recursive=True)
        kill_in_step(process, "driver", killed, step, draw)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 137, output
        assert_gone(processes)
    finish(left_alone)
    process = start("main_ppo", [*arguments(killed), "trainer.max_restarts=1"])
    kill_in_step(process, "TrainWorker", killed, 4, draw)
    output = finish(process)
    assert output.count("goes on after step") == 2 and "(restarts left: 0)" in output
    assert told(killed) == told(whole)
    lines = [json.loads(line)["step"] for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(lines)) == [*range(STEPS + 1)]
    for step in range(1, STEPS + 1):
        assert (killed / "samples" / f"{step}.jsonl").read_text() == (whole / "samples" / f"{step}.jsonl").read_text()
    found, expected = weights_and_moments(killed), weights_and_moments(whole)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    steps = sorted(path.name for path in killed.glob("global_step_*"))
    assert steps == [f"global_step_{STEPS - 1}", f"global_step_{STEPS}"]
    again = finish(start("main_ppo", arguments(killed)))
    assert f"the run is complete: {STEPS} of {STEPS} steps are done" in again

"""Rollouts that are continued over steps, in whole runs; with an engine alone in test_engine.py."""

import json
import random
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.integration.test_resume import compared_metrics, kill_in_step
from tests.integration.test_run import assert_gone, finish, metrics, start, validation_keys

CONTINUED = {"trainer.v1.trainer_mode": "colocate_async", "actor_rollout_ref.rollout.max_num_seqs": 4}


@pytest.fixture(scope="module")
def synchronous(overrides, tmp_path_factory):
    directory = tmp_path_factory.mktemp("synchronous")
    finish(start("main_ppo", overrides(directory, {"trainer.total_training_steps": 3})))
    return directory


@pytest.mark.drill
def test_with_a_threshold_of_zero_a_run_is_the_synchronous_one(overrides, synchronous, tmp_path):
    more = {"trainer.total_training_steps": 3, "trainer.v1.trainer_mode": "colocate_async"}
    finish(start("main_ppo", overrides(tmp_path, more | {"trainer.v1.sampler.max_off_policy_threshold": 0})))
    expected, measured = compared_metrics(synchronous), compared_metrics(tmp_path)
    for step, values in expected.items():
        both = values.keys() & measured[step].keys()
        assert len(both) > 50
        assert {name: measured[step][name] for name in both} == {name: values[name] for name in both}


@pytest.mark.slow
def test_a_run_trains_and_validates_with_responses_under_way_and_says_how_old_they_are(overrides, tiny, tmp_path):
    more = {"trainer.total_training_steps": 4, "trainer.test_freq": 2} | CONTINUED | validation_keys(tiny)
    finish(start("main_ppo", overrides(tmp_path, more)))
    found = metrics(tmp_path)
    assert found[1]["partial/open_at_switch"] > 0
    assert found[4]["partial/reprefill_tokens"] > 0
    assert (
        0
        < max(one["training/off_policy/trajectory_staleness_worst/max"] for one in found.values() if len(one) > 60)
        <= 8
    )
    assert any(name.startswith("val-core/") for name in found[2])
    lines = (tmp_path / "rollouts" / "4.jsonl").read_text().splitlines()
    episodes = [json.loads(line)["episode"] for line in lines]
    assert len(episodes) == 32 and all(episode["trained"] for episode in episodes)
    check_audit(episodes, found[4]["training/off_policy/trajectory_staleness_worst/max"])


def check_audit(episodes: list[dict], oldest: float) -> None:
    """The files of step 4 have the weights that sampled each token, and those that its loss was multiplied by."""
    for episode in episodes:
        versions, counts = zip(*episode["versions"], strict=True)
        assert sum(counts) == len(episode["weights"]) == episode["sampled_tokens"]
        assert list(versions) == sorted(versions) and versions[-1] <= 3
    assert 3 - min(episode["versions"][0][0] for episode in episodes) == oldest
    known = [episode for episode in episodes if "tokens" in episode]
    assert len(known) == 4
    for episode in known:
        ratios = np.subtract(episode["tokens"]["train_log_probs"], episode["tokens"]["log_probs"])
        assert episode["weights"] == pytest.approx(np.exp(ratios).clip(max=2).tolist(), abs=1e-4)


@pytest.mark.drill
def test_a_run_that_is_killed_with_responses_under_way_ends_as_one_that_never_was(overrides, tmp_path):
    def arguments(name: str) -> list[str]:
        more = {"trainer.deterministic": True, "trainer.total_training_steps": 5, "trainer.save_freq": 1}
        return overrides(tmp_path / name, more | CONTINUED)

    finish(start("main_ppo", arguments("unbroken")))
    process = start("main_ppo", arguments("killed"))
    processes = psutil.Process(process.pid).children(recursive=True)
    kill_in_step(process, "driver", tmp_path / "killed", 2, random.Random(3))
    process.communicate(timeout=60)
    assert_gone(processes)
    output = finish(start("main_ppo", arguments("killed")))
    assert "resuming after step" in output
    unbroken = compared_metrics(tmp_path / "unbroken")
    assert any(step["partial/continued_share"] > 0 for step in unbroken.values())
    assert compared_metrics(tmp_path / "killed") == unbroken


@pytest.mark.drill
@pytest.mark.parametrize("component", ["raylet/raylet", "gcs/gcs_server"])
def test_a_lost_ray_restarts_the_run_by_its_name(overrides, tmp_path, component):
    more = {"trainer.total_training_steps": 6, "trainer.save_freq": 1, "trainer.max_restarts": 1}
    keys = overrides(tmp_path, more | CONTINUED)
    process = start("main_ppo", keys)
    kill_in_step(process, component, tmp_path, 2, random.Random(5))
    output, _ = process.communicate(timeout=300)
    assert "Cancelled" not in output and process.returncode == 0 and metrics(tmp_path)[6], output
    lost = [f"Ray's {Path(component).name} ended without a message, as if killed"]
    lost.append("a library ended the driver without a message")  # Ray's, where the driver called it just then
    restarted = "from the last checkpoint (restarts left: 0)" in output
    assert restarted is any(each in output for each in lost)
    assert restarted or component.startswith("gcs"), "steps as short as these may end without the gcs_server"

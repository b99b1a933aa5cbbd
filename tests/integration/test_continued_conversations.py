"""Runs whose conversations outlive a step, with validation in between."""

from pathlib import Path

import pytest

from hybridrl.doctor.selftest_resume import MACHINE_METRICS
from tests.integration.test_run import driver_of, finish, metrics, start, validation_keys, wait_for_step

LOOP = "{{name: uneven, _target_: '{file}:Uneven', turns: 6, tokens: 12}}"
ENGINE = "rollout_corr/", "training/rollout_"
AGENT = "actor_rollout_ref.rollout.agent"


@pytest.fixture(scope="module")
def arguments(overrides, tiny, tmp_path_factory):
    loops = tmp_path_factory.mktemp("loops") / "loops.yaml"
    loops.write_text(f"- {LOOP.format(file=Path(__file__).with_name('agents.py'))}\n")

    def build(directory: Path, **more: object) -> list[str]:
        values = validation_keys(tiny) | {
            "data.train_batch_size": 4,
            "data.max_response_length": 100,
            "actor_rollout_ref.rollout.n": 2,
            "actor_rollout_ref.rollout.max_num_seqs": 16,
            f"{AGENT}.agent_loop_config_path": loops,
            f"{AGENT}.default_agent_loop": "uneven",
            "trainer.n_gpus_per_node": 1,
            "trainer.test_freq": 1,
            "trainer.total_training_steps": 3,
        }
        return overrides(directory, values | {key.replace("__", "."): value for key, value in more.items()})

    return build


@pytest.mark.drill
def test_with_a_bound_of_0_the_run_is_the_synchronous_one(arguments, tmp_path):
    """Every metric of every step and validation is the same number, except for seconds, and for the last bit of what
    the engine says of its log-probs: that depends on which turns find their prefix in the cache."""
    finish(start("main_ppo", arguments(tmp_path / "sync")))
    continued = {"trainer__v1__trainer_mode": "colocate_async", "trainer__v1__sampler__max_off_policy_threshold": 0}
    finish(start("main_ppo", arguments(tmp_path / "continued", **continued)))
    expected, found = metrics(tmp_path / "sync"), metrics(tmp_path / "continued")
    assert sorted(expected) == sorted(found) == [0, 1, 2, 3]
    assert expected[2]["num_turns/max"] > 1 and "val-core/quickstart/addition/acc/mean@2" in expected[2]
    for step, values in expected.items():
        same = [name for name in values if not MACHINE_METRICS.search(name) and not name.startswith(ENGINE)]
        assert {name: found[step].get(name) for name in same} == {name: values[name] for name in same}


@pytest.mark.drill
def test_conversations_continue_in_later_steps_and_after_a_kill(arguments, tmp_path):
    keys = arguments(
        tmp_path,
        trainer__v1__trainer_mode="colocate_async",
        trainer__v1__sampler__max_off_policy_threshold=2,
        trainer__total_training_steps=5,
        trainer__save_freq=1,
    )
    process = start("main_ppo", keys)
    wait_for_step(process, tmp_path, 3)
    driver_of(process).kill()
    process.communicate(timeout=60)
    output = finish(start("main_ppo", keys))
    assert "resuming after step" in output
    steps = metrics(tmp_path)
    assert sorted(steps) == [*range(6)]
    assert max(steps[step]["training/off_policy/trajectory_spans/max"] for step in range(1, 6)) > 1
    assert max(steps[step]["training/off_policy/trajectory_staleness_worst/max"] for step in range(1, 6)) <= 2
    assert all(steps[step].get("reward/faults", 0) == 0 for step in range(1, 6))
    assert all("val-core/quickstart/addition/acc/mean@2" in steps[step] for step in range(6))

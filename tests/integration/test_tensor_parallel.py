"""An engine over two devices, with weights from two training ranks; and these ranks with a part each of layers or
experts."""

import os
import time
from pathlib import Path

import pytest

from hybridrl.config import PPOConfig, load_ppo_config
from tests.integration.answers import generate, largest_gap, requests, rows, started, update

pytestmark = pytest.mark.slow


def agrees_twice(config: PPOConfig, place: Path) -> tuple[int, int]:
    """Engine and trainer agree, also after an update; returns how many there are of trainers and of engines."""
    with started(config, place) as (trainers, engine):
        wanted = requests(3)
        engine.to_rollout(0)
        responses = generate(engine, wanted)
        engine.to_training()
        batch = rows(wanted, responses)
        assert largest_gap(trainers, batch) < 1e-4
        update(trainers, batch)
        engine.to_rollout(1)
        responses = generate(engine, wanted)
        engine.to_training()
        assert largest_gap(trainers, rows(wanted, responses)) < 1e-4
        return len(trainers.group), len(engine.fleet)


def test_tensor_parallel_engines_agree_and_leave_no_shared_memory(overrides, tmp_path):
    config = load_ppo_config(overrides(tmp_path, {"actor_rollout_ref.rollout.tensor_model_parallel_size": 2}))
    before = set(os.listdir("/dev/shm"))
    assert agrees_twice(config, tmp_path) == (2, 1)
    deadline = time.monotonic() + 30
    while left := {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "vllm_"))} - before:
        assert time.monotonic() < deadline, f"left in /dev/shm: {left}"
        time.sleep(1)  # tests that run at the same time may start an engine, whose segments have names for a moment


@pytest.mark.parametrize("size", ["expert_parallel_size", "tensor_parallel_size"])
def test_a_trainer_with_divided_experts_or_layers_agrees_with_its_engines(overrides, mixture, tmp_path, size):
    more = {"actor_rollout_ref.model.path": mixture, f"actor_rollout_ref.actor.fsdp_config.{size}": 2}
    assert agrees_twice(load_ppo_config(overrides(tmp_path, more)), tmp_path) == (2, 2)

"""Stages of long reasoning, by the files of the recipe: one run, whose later stages have longer limits."""

import json
from pathlib import Path

import pytest

from hybridrl.core.experience.asynchronous import IN_FLIGHT
from hybridrl.core.experience.trajectory import TRUNCATED
from tests.integration.conftest import ROOT
from tests.integration.test_run import finish, metrics, start

pytestmark = pytest.mark.drill
RECIPE = ROOT / "recipes" / "long_reasoning"
STAGES = {"stage1_8k": (64, 3), "stage2_16k": (128, 6), "stage3_32k": (256, 9)}  # tokens, last step
REWARD = """
def compute_score(solution_str):
    return sum(character.isdigit() for character in solution_str) / max(len(solution_str), 1)
"""


@pytest.fixture
def stage(tiny, tmp_path):
    """Return the words of a stage, on two slots."""
    (tmp_path / "reward.py").write_text(REWARD)

    def words(name: str) -> list[str]:
        tokens, last = STAGES[name]
        before = max((end for _, end in STAGES.values() if end < last), default=0)
        values = {
            "data.train_files": tiny / "train.jsonl",
            "data.val_files": [],
            "data.train_batch_size": 8,
            "data.max_prompt_length": 32,
            "data.max_response_length": tokens,
            "actor_rollout_ref.model.path": tiny / "model",
            "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
            "actor_rollout_ref.actor.optim.lr": 1e-3,
            "actor_rollout_ref.rollout.n": 4,
            "actor_rollout_ref.rollout.max_num_seqs": 8,
            "reward.custom_reward_function.path": tmp_path / "reward.py",
            "trainer.device": "cpu",
            "trainer.n_gpus_per_node": 2,
            "trainer.save_freq": 1,
            "trainer.test_freq": -1,
            "trainer.max_actor_ckpt_to_keep": 20,
            "trainer.total_training_steps": last,
            "trainer.default_local_dir": tmp_path / "run",
            "trainer.rollout_data_dir": tmp_path / "samples",
        }
        if before:
            values["trainer.resume_from_path"] = tmp_path / "run" / f"global_step_{before}"
        return [
            f"--config-path={RECIPE}",
            f"--config-name={name}",
            *(f"{key}={value}" for key, value in values.items()),
        ]

    return words


def test_three_stages_are_one_run_with_every_response_accounted_for(stage, tmp_path: Path):
    first, second, third = STAGES
    finish(start("main_ppo", stage(first)))
    rejected = finish(start("main_ppo", stage(third)), 2)
    assert f"{third} continues from global_step_6 (trainer.resume_from_path), and" in rejected
    assert "is at step 3; first run what trains up to there" in rejected
    assert "resuming after step 3" in finish(start("main_ppo", stage(second)))
    output = finish(start("main_ppo", stage(third)))
    assert "resuming after step 6" in output and "data.max_response_length: 128 -> 256" in output
    steps = metrics(tmp_path / "run")
    assert sorted(step for step in steps if step) == [*range(1, 10)]
    trained: set[int] = set()
    for step in range(1, 10):
        trained |= check_step(step, steps[step], tmp_path)
        state = json.loads((tmp_path / "run" / f"global_step_{step}" / "state.json").read_text())
        carried = {position for position, _ in state[IN_FLIGHT]}
        assert len(trained) == 8 * step and not trained & carried
        assert trained | carried == {*range(state["prompts"] + len(carried))}
    assert any(step["partial/continued_share"] > 0 for step in steps.values() if len(step) > 60)
    for last in (3, 6):
        assert steps[last + 1]["critic/score/mean"] > steps[last]["critic/score/mean"] - 0.05


def check_step(step: int, values: dict[str, float], directory: Path) -> set[int]:
    """Check that all responses to the prompts of a step are trained on or left out by name, and how old their weights
    are; return the prompts."""
    limit = min(tokens for tokens, last in STAGES.values() if step <= last)
    lines = (directory / "samples" / f"{step}.jsonl").read_text().splitlines()
    episodes = [json.loads(line)["episode"] for line in lines]
    positions = {episode["position"] for episode in episodes}
    each = sorted((episode["position"], episode["sample"]) for episode in episodes)
    assert len(positions) == 8 and each == sorted((position, sample) for position in positions for sample in range(4))
    cut = [episode for episode in episodes if episode["stop"] in TRUNCATED]
    assert all(episode["sampled_tokens"] <= limit for episode in episodes) and cut
    assert values.get("sampling/masked_truncated", 0) == (len(cut) if step > 3 else 0)
    versions = [version for episode in episodes for version, _ in episode["versions"]]
    assert max(versions) == step - 1 and min(versions) >= step - 5
    return positions

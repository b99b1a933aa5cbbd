"""What a configuration makes of a run: the learning rates of its learners."""

from pathlib import Path

import pytest

from hybridrl.config import PPOConfig, load_ppo_config
from hybridrl.core.algorithms.algorithm import bind, find_policy_loss
from hybridrl.core.training.building import WorkerConfig
from hybridrl.core.training.learner import RankModel
from hybridrl.core.training.optimizer import schedule
from hybridrl.required import required
from hybridrl.runs.settings import build_algorithm, build_policy_plan, ppo_worker_config
from tests.sections import keys_of_run

ACTOR = "actor_rollout_ref.actor"
# 4 prompts a step: 2 per update, gone through twice, are 4 updates of the policy; the critic has one.
ARITHMETIC = [
    "data.train_batch_size=4",
    f"{ACTOR}.ppo_mini_batch_size=2",
    f"{ACTOR}.ppo_epochs=2",
    "critic.ppo_mini_batch_size=4",
    "critic.ppo_epochs=1",
]


def load(directory: Path, *overrides: str) -> PPOConfig:
    return load_ppo_config([*keys_of_run(directory), *ARITHMETIC, *overrides])


def worker_config(directory: Path, steps: int, *overrides: str) -> WorkerConfig:
    config = load(directory, *overrides)
    return ppo_worker_config(config, build_algorithm(config), directory, steps)


def rates(model: RankModel, updates: int) -> list[float]:
    """The learning rate at each of the first updates, as a share of its highest."""
    learner = required(model.trained)
    plan = (learner.total_updates, learner.optimizer, learner.updates_per_step)
    return [schedule(update, *plan) for update in range(updates)]


def test_own_keys_reach_a_custom_estimator_and_a_custom_loss(tmp_path: Path) -> None:
    code = "def estimate(batch, settings): return settings.own\ndef loss(log_probs, batch, *, own): return own\n"
    (tmp_path / "mine.py").write_text(code)
    keys = (
        f"algorithm.adv_estimator={tmp_path}/mine.py:estimate",
        f"{ACTOR}.policy_loss.loss_mode={tmp_path}/mine.py:loss",
    )
    config = load(tmp_path, *keys, "+own.bonus=0.5", "+my.list=[1,2]")
    own = {"bonus": 0.5, "my": {"list": [1, 2]}}
    assert build_algorithm(config).estimator(None) == own
    loss = build_policy_plan(config).loss
    assert bind(find_policy_loss(loss.terms[0].function)[1], loss.parameters, rows=2)(None, None) == own


def test_a_warm_up_of_two_steps_ends_with_the_second_step_however_many_updates_that_takes(tmp_path: Path) -> None:
    config = worker_config(tmp_path, 10, f"{ACTOR}.optim.lr_warmup_steps=2", "critic.optim.lr_warmup_steps=2")
    assert rates(config.models["actor"], 9) == pytest.approx([1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8, 6 / 8, 7 / 8, 1, 1])
    assert rates(config.models["critic"], 3) == pytest.approx([1 / 2, 1, 1])


def test_a_warm_up_may_end_within_a_step(tmp_path: Path) -> None:
    config = worker_config(tmp_path, 10, f"{ACTOR}.optim.lr_warmup_steps=0.75")
    assert rates(config.models["actor"], 5) == pytest.approx([1 / 3, 2 / 3, 1, 1, 1])


@pytest.mark.parametrize("steps", ["0", "-1", "null"])
def test_without_a_number_of_steps_the_ratio_is_of_all_updates(tmp_path: Path, steps: str) -> None:
    warm_up = (f"{ACTOR}.optim.lr_warmup_steps={steps}", f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1")
    assert rates(worker_config(tmp_path, 10, *warm_up).models["actor"], 5) == pytest.approx([1 / 4, 2 / 4, 3 / 4, 1, 1])


def test_a_linear_schedule_ends_with_the_run_whatever_total_the_optimizer_is_given(tmp_path: Path) -> None:
    linear = (f"{ACTOR}.optim.lr_scheduler_type=linear", f"{ACTOR}.optim.total_training_steps=5")
    config = worker_config(tmp_path, 10, *linear)
    assert rates(config.models["actor"], 41)[::10] == pytest.approx([1, 0.75, 0.5, 0.25, 0])

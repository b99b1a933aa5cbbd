"""Reinforcement learning: `hybridrl train key=value ...`"""

import sys

from hybridrl.config import load_ppo_config
from hybridrl.runs.command import training
from hybridrl.runtime.cli import RunCommand, run_command
from hybridrl.runtime.guard import guarded

COMMAND = RunCommand(
    name="train",
    purpose="Train a language model by reinforcement learning, with FSDP2 and vLLM on the same devices.",
    example=(
        "data.train_files=train.parquet",
        "data.val_files=test.parquet",
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=8",
    ),
    config_name="ppo_trainer",
    first_keys=(
        "data.train_files",
        "data.val_files",
        "actor_rollout_ref.model.path",
        "reward.custom_reward_function.path",
        "data.train_batch_size",
        "data.max_response_length",
        "algorithm.adv_estimator",
        "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.actor.optim.lr",
        "trainer.total_training_steps",
        "trainer.default_local_dir",
    ),
    load=load_ppo_config,
    open=training("hybridrl.runs.ppo:PPOJob"),
)


def main(argv: list[str] | None = None) -> int:
    return run_command(COMMAND, argv)


if __name__ == "__main__":
    sys.exit(guarded(main))

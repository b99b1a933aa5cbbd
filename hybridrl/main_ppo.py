"""Reinforcement learning: `python -m hybridrl.main_ppo key=value ...`"""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from hybridrl.config import PPOConfig, load_ppo_config
from hybridrl.runs.plugins import load
from hybridrl.runtime.cli import Command, run_command
from hybridrl.runtime.forks import fork_server
from hybridrl.runtime.guard import guarded
from hybridrl.tracking.console import stage


@contextmanager
def opened(first: PPOConfig) -> Iterator[Callable[[PPOConfig], None]]:
    """Yield what runs trainings, from data to saved model, one after another on the Ray of the `first`.
    Invalid input is rejected before Ray starts."""
    with fork_server(first, engine=True) as forks:
        with stage("loading torch, transformers and Ray"):  # only for a valid configuration
            from hybridrl.runs.ppo import PPOJob
            from hybridrl.runs.setup import Sessions, train

            check_start = load("preflight")

        def run(config: PPOConfig) -> None:
            check_start(config)
            train(config, PPOJob, sessions)

        with closing(Sessions(forks)) as sessions:
            yield run


COMMAND = Command(
    module="hybridrl.main_ppo",
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
    open=opened,
)


def main(argv: list[str] | None = None) -> int:
    return run_command(COMMAND, argv)


if __name__ == "__main__":
    sys.exit(guarded(main))

"""Reinforcement learning: `python -m hybridrl.main_ppo key=value ...`"""

import sys

from hybridrl.command_line import run_command
from hybridrl.config import PPOConfig, load_ppo_config

EXAMPLE = """python -m hybridrl.main_ppo data.train_files=train.parquet data.val_files=test.parquet \\
           actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct actor_rollout_ref.rollout.n=8 [key=value ...]"""


def main(argv: list[str] | None = None) -> int:
    purpose = "Train a language model by reinforcement: GRPO, with FSDP2 and vLLM on the same devices."
    return run_command(purpose, EXAMPLE, "ppo_trainer", load_ppo_config, run, argv)


def run(config: PPOConfig) -> None:
    """One training run, from data to saved model. What can be refused is refused before Ray starts."""
    from hybridrl.ppo import train  # torch, Ray and transformers: only once the configuration stands

    train(config)


if __name__ == "__main__":
    sys.exit(main())

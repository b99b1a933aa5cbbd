"""Training of a reward model: `hybridrl rm key=value ...`"""

import sys
from typing import Any

from hybridrl.config import SFTConfig, load_sft_config
from hybridrl.runs.command import SUPERVISED_KEYS, training
from hybridrl.runtime.cli import RunCommand, run_command
from hybridrl.runtime.guard import guarded


def load(*arguments: Any, **options: Any) -> SFTConfig:
    """Return the configuration of a run. Raises ConfigError."""
    config = load_sft_config(*arguments, **options)
    config.pairs.center = config.pairs.center or 0.0
    return config


COMMAND = RunCommand(
    name="rm",
    purpose="Train a reward model on pairs: rows with a prompt and two responses, chosen and rejected.",
    example=("data.train_files=pairs.jsonl", "model.path=Qwen/Qwen2.5-0.5B-Instruct"),
    config_name="sft_trainer",
    first_keys=(*SUPERVISED_KEYS, "pairs.center"),
    load=load,
    open=training("hybridrl.runs.rm:RewardModelJob"),
)


def main(argv: list[str] | None = None) -> int:
    return run_command(COMMAND, argv)


if __name__ == "__main__":
    sys.exit(guarded(main))

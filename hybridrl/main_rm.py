"""Training of a reward model: `hybridrl rm key=value ...`"""

import sys

from hybridrl.config import load_sft_config
from hybridrl.main_sft import COMMAND as SFT
from hybridrl.runs.command import training
from hybridrl.runtime.cli import RunCommand, run_command
from hybridrl.runtime.guard import guarded

COMMAND = RunCommand(
    name="rm",
    purpose="Train a reward model on pairs: rows with a prompt and two responses, chosen and rejected.",
    example=("data.train_files=pairs.jsonl", "model.path=Qwen/Qwen2.5-0.5B-Instruct"),
    config_name="sft_trainer",
    first_keys=(*SFT.first_keys, "pairs.center"),
    load=load_sft_config,
    open=training("hybridrl.runs.rm:RewardModelJob"),
)


def main(argv: list[str] | None = None) -> int:
    return run_command(COMMAND, argv)


if __name__ == "__main__":
    sys.exit(guarded(main))

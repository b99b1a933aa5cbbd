"""Training of a reward model: `hybridrl rm key=value ...`"""

import sys

from hybridrl.config import load_sft_config
from hybridrl.runs.command import training
from hybridrl.runtime.cli import RunCommand, run_command
from hybridrl.runtime.guard import guarded

COMMAND = RunCommand(
    name="rm",
    purpose="Train a reward model on pairs: rows with a prompt and two responses, chosen and rejected.",
    example=("data.train_files=pairs.jsonl", "model.path=Qwen/Qwen2.5-0.5B-Instruct"),
    config_name="sft_trainer",
    first_keys=(
        "data.train_files",
        "data.val_files",
        "model.path",
        "data.max_length",
        "data.train_batch_size",
        "optim.lr",
        "pairs.center",
        "trainer.total_epochs",
        "trainer.n_gpus_per_node",
        "trainer.default_local_dir",
    ),
    load=load_sft_config,
    open=training("hybridrl.runs.rm:RewardModelJob"),
)


def main(argv: list[str] | None = None) -> int:
    return run_command(COMMAND, argv)


if __name__ == "__main__":
    sys.exit(guarded(main))

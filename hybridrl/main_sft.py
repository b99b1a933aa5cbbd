"""Supervised fine-tuning: `hybridrl sft key=value ...`"""

import sys

from hybridrl.config import load_sft_config
from hybridrl.runs.command import SUPERVISED_KEYS, training
from hybridrl.runtime.cli import RunCommand, run_command
from hybridrl.runtime.guard import guarded

COMMAND = RunCommand(
    name="sft",
    purpose="Fine-tune a language model on conversations, with the loss on the assistant's messages.",
    example=("data.train_files=train.jsonl", "model.path=Qwen/Qwen2.5-0.5B"),
    config_name="sft_trainer",
    first_keys=SUPERVISED_KEYS,
    load=load_sft_config,
    open=training("hybridrl.runs.sft:SFTJob"),
)


def main(argv: list[str] | None = None) -> int:
    return run_command(COMMAND, argv)


if __name__ == "__main__":
    sys.exit(guarded(main))

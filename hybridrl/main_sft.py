"""Supervised fine-tuning: `python -m hybridrl.main_sft key=value ...`"""

import sys

from hybridrl.command_line import run_command
from hybridrl.config import SFTConfig, load_sft_config

EXAMPLE = """python -m hybridrl.main_sft data.train_files=train.jsonl model.path=Qwen/Qwen2.5-0.5B [key=value ...]"""


def main(argv: list[str] | None = None) -> int:
    purpose = "Fine-tune a language model on conversations, with the loss on the assistant's messages."
    return run_command(purpose, EXAMPLE, "sft_trainer", load_sft_config, run, argv)


def run(config: SFTConfig) -> None:
    """One training run, from conversations to saved model. What can be refused is refused before Ray starts."""
    from hybridrl.sft import train  # torch, Ray and transformers: only once the configuration stands

    train(config)


if __name__ == "__main__":
    sys.exit(main())

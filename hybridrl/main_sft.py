"""Supervised fine-tuning: `python -m hybridrl.main_sft key=value ...`"""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from hybridrl.config import SFTConfig, load_sft_config
from hybridrl.runs.plugins import load
from hybridrl.runtime.cli import Command, run_command
from hybridrl.runtime.forks import fork_server
from hybridrl.runtime.guard import guarded
from hybridrl.tracking.console import stage


@contextmanager
def opened(first: SFTConfig) -> Iterator[Callable[[SFTConfig], None]]:
    """Yield what runs fine-tunings, from conversations to saved model, one after another on the Ray of the `first`.
    Invalid input is rejected before Ray starts."""
    with fork_server(first, engine=False) as forks:
        # torch and Ray are imported only for a valid configuration
        with stage("loading torch, transformers and Ray"):
            from hybridrl.runs.setup import Sessions, train
            from hybridrl.runs.sft import SFTJob

            check_start = load("preflight")

        def run(config: SFTConfig) -> None:
            check_start(config)
            train(config, SFTJob, sessions)

        with closing(Sessions(forks)) as sessions:
            yield run


COMMAND = Command(
    module="hybridrl.main_sft",
    purpose="Fine-tune a language model on conversations, with the loss on the assistant's messages.",
    example=("data.train_files=train.jsonl", "model.path=Qwen/Qwen2.5-0.5B"),
    config_name="sft_trainer",
    first_keys=(
        "data.train_files",
        "data.val_files",
        "model.path",
        "data.max_length",
        "data.train_batch_size",
        "data.max_token_len_per_gpu",
        "optim.lr",
        "trainer.total_epochs",
        "trainer.n_gpus_per_node",
        "trainer.default_local_dir",
    ),
    load=load_sft_config,
    open=opened,
)


def main(argv: list[str] | None = None) -> int:
    return run_command(COMMAND, argv)


if __name__ == "__main__":
    sys.exit(guarded(main))

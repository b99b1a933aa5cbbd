"""The saved steps of a run: each is whole or absent, as it is written aside and appears by one rename."""

import shutil
from collections.abc import Callable
from pathlib import Path

from hybridrl.checkpoint.export import publish

LATEST = "latest_checkpointed_iteration.txt"
SKIPPED_UPDATES = "skipped_updates"  # where training ranks write the rows of updates that were not finite


class Store:
    """`<directory>/global_step_N/{actor,critic}/huggingface` and the file that names the newest N."""

    def __init__(self, directory: Path, save_tokenizer: Callable[[Path], object]) -> None:
        self.directory, self.save_tokenizer = directory, save_tokenizer

    def last(self) -> Path | None:
        """The newest step saved."""
        latest = self.directory / LATEST
        return self.directory / f"global_step_{latest.read_text()}" if latest.is_file() else None

    def save(self, step: int, **models: Callable[[Path], None]) -> Path:
        """Write a step's models by name and publish it. A write that fails leaves the older steps as they are."""
        final = self.directory / f"global_step_{step}"
        aside = self.directory / f".global_step_{step}.writing"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            for name, export in models.items():
                model = aside / name / "huggingface"
                model.mkdir(parents=True)
                export(model)
                self.save_tokenizer(model)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        shutil.rmtree(final, ignore_errors=True)
        publish(aside, final)
        latest = self.directory / f".{LATEST}.writing"
        latest.write_text(str(step))
        publish(latest, self.directory / LATEST)
        return final / "actor" / "huggingface"

"""Sampled episodes in files, a few of them as tables, and the batches of steps that are worth another look."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hybridrl.batch import Batch
from hybridrl.experience.conversations import transcript
from hybridrl.experience.episodes import Episode
from hybridrl.tracking import SampleRow, Tracker
from hybridrl.tracking.console import console, sample_table, warn

EXAMPLES, REPLAYS = 3, 3  # samples shown with a diagnosis, and batches that are retained


class SampleLog:
    """Writes all samples of a step to a .jsonl file in `training_dir` and `validation_dir`, if set, and the first
    `shown` of a validation to the tracker; batches to `replay_dir`."""

    def __init__(
        self, tracker: Tracker, *, training_dir: str | None, validation_dir: str | None, replay_dir: Path, shown: int
    ) -> None:
        self.tracker, self.training_dir, self.validation_dir = tracker, training_dir, validation_dir
        self.replay_dir, self.shown = replay_dir, shown

    def training_samples(self, step: int, episodes: Sequence[Episode]) -> None:
        if self.training_dir:
            self._dump(Path(self.training_dir), step, episodes)

    def validation_samples(self, step: int, episodes: Sequence[Episode]) -> None:
        if self.validation_dir:
            self._dump(Path(self.validation_dir), step, episodes)
        if self.shown > 0:
            self.tracker.samples(step, _rows(episodes[: self.shown]))

    @staticmethod
    def show(step: int, episodes: Sequence[Episode]) -> None:
        """Print the samples of a few prompts."""
        some = episodes[:: max(1, -(-len(episodes) // EXAMPLES))]
        console.print(sample_table(f"samples of step {step}", _rows(some)))

    def keep(self, step: int, batch: Batch) -> None:
        """Write the batch that a step trained on, for `doctor replay`; the last few are retained."""
        try:
            self.replay_dir.mkdir(exist_ok=True)
            np.savez(self.replay_dir / f"{step}.npz", **batch.__getstate__())
        except OSError as error:
            warn(f"{self.replay_dir}: {error.strerror or error}; the batch of step {step} is not kept")
        for older in replays(self.replay_dir)[:-REPLAYS]:
            older.unlink()

    @staticmethod
    def _dump(directory: Path, step: int, episodes: Sequence[Episode]) -> None:
        path = directory / f"{step}.jsonl"
        try:
            dump_samples(path, step, episodes)
        except OSError as error:  # a full disk does not end the run
            path.unlink(missing_ok=True)
            warn(f"{path} could not be written: {error.strerror or error}; training continues", "samples-lost")

    def delete_after(self, step: int) -> None:
        """Delete the samples of later steps, which a run that resumes after this one samples again."""
        for directory in filter(None, (self.training_dir, self.validation_dir)):
            for path in Path(directory).glob("*.jsonl"):
                if path.stem.isdecimal() and int(path.stem) > step:
                    path.unlink()


def dump_samples(path: Path, step: int, episodes: Sequence[Episode]) -> None:
    """Write one JSON object per sample with verl's keys: input, output, gts, score, step, and all keys of the reward's
    dict; with the transcript of a conversation."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps(
            {
                "input": _prompt_text(episode),
                "output": episode.text,
                "gts": episode.prompt.ground_truth,
                "score": episode.score.value,
                "step": step,
                **{name: value for name, value in episode.score.extras.items() if name != "score"},
                **({"fault": episode.score.fault} if episode.score.fault else {}),
                **transcript(episode.trajectory),
            },
            ensure_ascii=False,
            default=str,
        )
        for episode in episodes
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def replays(directory: Path) -> list[Path]:
    """Return the batches that were kept, by step."""
    return sorted(directory.glob("*.npz"), key=lambda path: int(path.stem))


def read_batch(path: Path) -> Batch:
    """Return a batch that was kept."""
    batch = Batch.__new__(Batch)
    with np.load(path, allow_pickle=False) as arrays:
        batch.__setstate__(dict(arrays))
    return batch


def _rows(episodes: Sequence[Episode]) -> list[SampleRow]:
    scores = [math.nan if one.score.value is None else one.score.value for one in episodes]
    pairs = zip(episodes, scores, strict=True)
    return [SampleRow(_prompt_text(one), one.text, str(one.prompt.ground_truth), score) for one, score in pairs]


def _prompt_text(episode: Episode) -> str:
    messages = episode.prompt.messages
    if isinstance(messages, str):
        return messages
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)

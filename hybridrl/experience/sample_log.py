"""What a run leaves behind: metrics to the loggers, samples to files and tables."""

import json
from collections.abc import Sequence
from pathlib import Path

from hybridrl.experience.episodes import Sample
from hybridrl.tracking import SampleRow, Tracker
from hybridrl.tracking.log import warn


class Records:
    """`training_dir` and `validation_dir` take every sample, one .jsonl a step, where they are set."""

    def __init__(self, tracker: Tracker, *, training_dir: str | None, validation_dir: str | None, shown: int) -> None:
        self.tracker, self.training_dir, self.validation_dir, self.shown = (
            tracker,
            training_dir,
            validation_dir,
            shown,
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.tracker.log(step, metrics)

    def training_samples(self, step: int, samples: Sequence[Sample]) -> None:
        if self.training_dir:
            self._dump(Path(self.training_dir), step, samples)

    def validation_samples(self, step: int, samples: Sequence[Sample]) -> None:
        if self.validation_dir:
            self._dump(Path(self.validation_dir), step, samples)
        if self.shown > 0:
            self.tracker.samples(step, [_row(sample) for sample in samples[: self.shown]])

    @staticmethod
    def _dump(directory: Path, step: int, samples: Sequence[Sample]) -> None:
        path = directory / f"{step}.jsonl"
        try:
            dump_samples(path, step, samples)
        except OSError as error:  # a full disk ends no run
            path.unlink(missing_ok=True)
            warn(f"{path} could not be written: {error.strerror or error}; training continues")

    def forget_after(self, step: int) -> None:
        """Delete the samples of later steps: a run that goes on after this one makes those anew."""
        for directory in filter(None, (self.training_dir, self.validation_dir)):
            for path in Path(directory).glob("*.jsonl"):
                if path.stem.isdecimal() and int(path.stem) > step:
                    path.unlink()


def dump_samples(path: Path, step: int, samples: Sequence[Sample]) -> None:
    """One object a sample in verl's form: input, output, gts, score, step, and all that the reward said."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps(
            {
                "input": _text(sample),
                "output": sample.text,
                "gts": sample.prompt.ground_truth,
                "score": sample.score.value,
                "step": step,
                **{name: value for name, value in sample.score.extras.items() if name != "score"},
                **({"fault": sample.score.fault} if sample.score.fault else {}),
            },
            ensure_ascii=False,
            default=str,
        )
        for sample in samples
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _row(sample: Sample) -> SampleRow:
    score = sample.score.value if sample.score.value is not None else float("nan")
    return SampleRow(_text(sample), sample.text, str(sample.prompt.ground_truth), score)


def _text(sample: Sample) -> str:
    messages = sample.prompt.messages
    if isinstance(messages, str):
        return messages
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)

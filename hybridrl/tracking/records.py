"""The files of sampled episodes, `<step>.jsonl`, one JSON object per episode: verl's keys `input`, `output`, `gts`,
`score` and `step`, every key of the reward's dict, and under `episode` what hybridrl knows besides (docs/samples.md).

A file is written whole: it is there with all of its lines, or not at all. verl's own files are read likewise.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.tracking.console import warn

VERL_KEYS = ("input", "output", "gts", "score", "step")
OWN_KEY = "episode"


@dataclass(frozen=True)
class SampleRecord:
    """One episode as it was written, e.g. `SampleRecord("user: 2+2?", "4", "4", 1.0, 7, {"acc": True}, {"row": 3})`.

    `score` is None if the grader failed; `components` are the other keys of the reward's dict, and `episode` is empty
    in files of verl.
    """

    prompt: str
    response: str
    truth: Any
    score: float | None
    step: int
    components: dict[str, Any]
    episode: dict[str, Any]


def write_records(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write a file of episodes by one rename; OSError leaves nothing behind."""
    temporary = path.with_name(f".{path.name}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
            for record in records:
                file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def record_files(directory: Path) -> dict[int, Path]:
    """Return the files of a directory by step, in order; none if there is no such directory."""
    files = {int(path.stem): path for path in directory.glob("*.jsonl") if path.stem.isdecimal()}
    return dict(sorted(files.items()))


def records_of(run_dir: Path, name: str) -> dict[int, Path]:
    """Return the files of a run by step: those in its directory `name`, or its own if it is itself such a directory."""
    return record_files(run_dir / name) or record_files(run_dir)


def read_records(path: Path) -> Iterator[SampleRecord]:
    """Yield the episodes of a file. Lines that are no JSON object, as a copy that was cut short may have, are skipped
    with one warning."""
    skipped = 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
                yield _record(record)
            except (ValueError, TypeError, AttributeError):
                skipped += 1
    if skipped:
        warn(f"{path}: {skipped} line{'s' * (skipped > 1)} cannot be read as a sample and skipped", "samples-lost")


def _record(record: dict[str, Any]) -> SampleRecord:
    components = {name: value for name, value in record.items() if name not in (*VERL_KEYS, OWN_KEY)}
    prompt, response, truth, score, step = map(record.get, VERL_KEYS)
    if prompt is None and response is None:
        raise ValueError("no sample")
    number = float(score) if isinstance(score, bool | int | float) else None
    episode = record.get(OWN_KEY)
    return SampleRecord(
        _text(prompt),
        _text(response),
        truth,
        number,
        int(step or 0),
        components,
        episode if isinstance(episode, dict) else {},
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

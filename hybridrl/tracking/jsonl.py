"""`metrics.jsonl`: each `log` call is one line `{"step": N, ...}`, on disk when the call returns.

A second call for a step is a second line, so nothing is buffered until a step ends; `read_metrics` joins them.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

from hybridrl.tracking.console import warn
from hybridrl.tracking.sink import Sink

Record = dict[str, float | None]


def read_metrics(run_dir: Path) -> dict[int, dict[str, float]]:
    """Return the metrics by step, in order; of a name logged twice for a step the later value is kept. null is NaN."""
    steps: dict[int, dict[str, float]] = {}
    for _, record in _read_lines(run_dir / "metrics.jsonl"):
        values = {name: math.nan if value is None else value for name, value in record.items()}
        steps.setdefault(int(values.pop("step")), {}).update(values)
    return dict(sorted(steps.items()))


def _read_lines(path: Path) -> list[tuple[str, Record]]:
    """Return the readable lines with their records.

    A killed run may leave an incomplete line at the end, and a machine that lost power a line of zeros.
    """
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    lines = []
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        record = _parse(line)
        if record is None:
            warn(f"{path}, line {number} cannot be read as metrics and is skipped: {line[:40]!r}")
        else:
            lines.append((line, record))
    return lines


def _parse(line: str) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    return record if all(value is None or isinstance(value, int | float) for value in record.values()) else None


class JsonlSink(Sink):
    """Appends to the lines up to `last_step` if the run is resumed; a new run moves an existing file aside.

    Lines that a full disk has no room for are written before the next line.
    """

    def __init__(self, path: Path, last_step: int | None = None) -> None:
        if last_step is not None:
            _drop_later_steps(path, last_step)
        elif path.exists():
            path.replace(path.with_name(f"{path.stem}.previous{path.suffix}"))
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        # JSON has no NaN and no infinity, and a reader must not need Python's dialect of it.
        values = {
            name: value if isinstance(value, int) else float(value) if math.isfinite(value) else None
            for name, value in metrics.items()
        }
        self._unwritten += json.dumps({"step": step} | values).encode() + b"\n"
        self._write()

    def _write(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def state_dict(self) -> dict[str, Any]:
        self._write()
        os.fsync(self._file.fileno())
        return {}

    def close(self) -> None:
        with self._file:
            self._write()


def _drop_later_steps(path: Path, last_step: int) -> None:
    """Drop later steps and unreadable lines by one rename: a kill in between leaves the file unchanged."""
    temporary = path.with_name(f".{path.name}.writing")
    with temporary.open("w") as file:
        file.writelines(line + "\n" for line, record in _read_lines(path) if record["step"] <= last_step)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)

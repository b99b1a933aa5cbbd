"""`metrics.jsonl`: one `log` call, one line `{"step": N, ...}`, on disk when the call returns.

A second call for a step is a second line, so that nothing waits in memory for a step to end;
`report.read_metrics` joins them.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

from hybridrl.tracking.sink import Sink


def finished_lines(path: Path) -> list[str]:
    """The lines that were written to their end; a killed run may leave half a line."""
    return path.read_text().split("\n")[:-1] if path.exists() else []


class JsonlSink(Sink):
    """Appends to what a run had logged up to `last_step`, where it goes on; a new one moves an older file aside."""

    def __init__(self, path: Path, last_step: int | None = None) -> None:
        if last_step is not None:
            _cut(path, last_step)
        elif path.exists():
            path.replace(path.with_name(f"{path.stem}.previous{path.suffix}"))
        self._file = path.open("a")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        values = {name: _json_number(value) for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step} | values) + "\n")
        self._file.flush()

    def state(self) -> dict[str, Any]:
        os.fsync(self._file.fileno())
        return {}

    def close(self) -> None:
        self._file.close()


def _cut(path: Path, last_step: int) -> None:
    """Drop later steps and a half-written line, by one rename: a kill in between leaves the file as it was."""
    aside = path.with_name(f".{path.name}.writing")
    with aside.open("w") as file:
        file.writelines(line + "\n" for line in finished_lines(path) if json.loads(line)["step"] <= last_step)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def _json_number(value: float) -> int | float | None:
    # JSON has no NaN and no infinity, and a reader of the file must not need Python's dialect.
    if isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else None

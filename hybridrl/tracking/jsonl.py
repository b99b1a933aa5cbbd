"""`metrics.jsonl`: one `log` call, one line `{"step": N, ...}`, on disk when the call returns.

A second call for a step is a second line, so that nothing waits in memory for a step to end;
`report.read_metrics` joins them.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

from hybridrl.tracking.log import warn
from hybridrl.tracking.sink import Sink

Record = dict[str, float | None]


def logged(path: Path) -> list[tuple[str, Record]]:
    """The lines that can be read, each with what it says.

    A killed run may leave half a line at the end, and a machine that lost its power one of zeros.
    """
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    found = []
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        record = _record(line)
        if record is None:
            warn(f"{path}, line {number} cannot be read as metrics and is left out: {line[:40]!r}")
        else:
            found.append((line, record))
    return found


def _record(line: str) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    return record if all(value is None or isinstance(value, int | float) for value in record.values()) else None


class JsonlSink(Sink):
    """Appends to what a run had logged up to `last_step`, where it goes on; a new one moves an older file aside.

    What a full disk has no room for is written before the next line.
    """

    def __init__(self, path: Path, last_step: int | None = None) -> None:
        if last_step is not None:
            _cut(path, last_step)
        elif path.exists():
            path.replace(path.with_name(f"{path.stem}.previous{path.suffix}"))
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        values = {name: _json_number(value) for name, value in metrics.items()}
        self._unwritten += json.dumps({"step": step} | values).encode() + b"\n"
        self._write()

    def _write(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def state(self) -> dict[str, Any]:
        self._write()
        os.fsync(self._file.fileno())
        return {}

    def close(self) -> None:
        with self._file:
            self._write()


def _cut(path: Path, last_step: int) -> None:
    """Drop later steps and what cannot be read, by one rename: a kill in between leaves the file as it was."""
    aside = path.with_name(f".{path.name}.writing")
    with aside.open("w") as file:
        file.writelines(line + "\n" for line, record in logged(path) if record["step"] <= last_step)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def _json_number(value: float) -> int | float | None:
    # JSON has no NaN and no infinity, and a reader of the file must not need Python's dialect.
    if isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else None

"""`metrics.jsonl`: one `log` call, one line `{"step": N, ...}`, on disk when the call returns.

A second call for a step is a second line, so that nothing waits in memory for a step to end;
`report.read_metrics` joins them.
"""

import json
import math
from pathlib import Path

from hybridrl.tracking.sink import Sink


def finished_lines(path: Path) -> list[str]:
    """The lines that were written to their end; a killed run may leave half a line."""
    return path.read_text().split("\n")[:-1] if path.exists() else []


class JsonlSink(Sink):
    """Appends to what the run had logged up to `start_step`; a new run (0) moves an older file aside."""

    def __init__(self, path: Path, start_step: int = 0) -> None:
        lines = finished_lines(path) if start_step else []
        if path.exists():
            path.replace(path.with_name(f"{path.stem}.previous{path.suffix}"))
        self._file = path.open("w")
        self._file.writelines(line + "\n" for line in lines if json.loads(line)["step"] <= start_step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        values = {name: _json_number(value) for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step} | values) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _json_number(value: float) -> int | float | None:
    # JSON has no NaN and no infinity, and a reader of the file must not need Python's dialect.
    if isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else None

"""`python -m hybridrl.doctor checkpoints DIR`: every checkpoint of a run with its age, size, health and score.

Every byte is compared with the manifest, as when a run resumes.
"""

import contextlib
import json
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from rich.table import Table

from hybridrl.doctor import directory_parser
from hybridrl.runs.directory import SHOWN, RunDirectory
from hybridrl.tracking.console import Terminal


@dataclass(frozen=True)
class Row:
    """A checkpoint: seconds since it was saved, bytes, damaged files, why it is not healthy (empty: it is), and its
    score if its state has one. `kind` is kept, recovery, verl or unreadable; `resumes`: `resume_mode=auto` takes it."""

    step: int
    age: float
    size: int
    damaged: list[str]
    problem: str
    kind: str
    score: float | None
    best: bool
    resumes: bool


def list_rows(directory: Path) -> tuple[list[Row], str]:
    """Return the checkpoints by step, and the name of their score, empty if they have none."""
    run = RunDirectory(directory, checksums=True)
    name, sign, scores = run.scores()
    best, now = max(scores, key=lambda step: sign * scores[step], default=None), time.time()
    rows = [
        Row(
            step=one.step,
            age=now - (one.written or now),
            size=one.size,
            damaged=one.damaged,
            problem=one.unhealthy,
            kind=one.kind,
            score=scores.get(one.step),
            best=one.step == best,
            resumes=one is run.newest,
        )
        for one in run.checkpoints
    ]
    return rows, name


def _table(rows: list[Row], name: str) -> Table:
    table = Table(title_justify="left")
    for column, side in (("step", "right"), ("age", "right"), ("size", "right"), ("state", "left")):
        table.add_column(column, justify=side, overflow="fold")
    table.add_column(name or "score", justify="right", overflow="fold")
    table.add_column("")
    for row in rows:
        files = "; ".join(row.damaged[:SHOWN]) + " ..." * (len(row.damaged) > SHOWN)
        state = [f"damaged: {files}"] * bool(files) + [f"not healthy: {row.problem}"] * bool(row.problem)
        score = "" if row.score is None else f"{row.score:.4g}{' (best)' * row.best}"
        kind = [row.kind] * (row.kind != "kept")
        cells = (
            str(timedelta(seconds=round(row.age))),
            f"{row.size / 1e6:,.1f} MB",
            "; ".join([*kind, *state] or ["intact"]),
        )
        table.add_row(str(row.step), *cells, score, "<- a run resumes here" if row.resumes else "", style=_style(row))
    return table


def _style(row: Row) -> str:
    return "red" if row.damaged else "yellow" if row.problem else "bold" if row.resumes else ""


def main(argv: list[str]) -> int:
    parser = directory_parser(
        "checkpoints",
        "Every checkpoint of a run; all files are compared with their checksums.",
        epilog="exit status: 0 a run could resume, 1 there is no checkpoint to resume from, 2 it cannot be parsed",
        as_json="the list, with age in seconds and size in bytes,",
    )
    arguments = parser.parse_args(argv)
    with contextlib.redirect_stdout(sys.stderr):  # standard output has the table only
        rows, name = list_rows(arguments.directory)
    if arguments.json:
        print(json.dumps({"score": name, "checkpoints": list(map(asdict, rows))}, indent=2))
    elif rows:
        Terminal().print(_table(rows, name))
    else:
        print(f"{arguments.directory} has no checkpoints", file=sys.stderr)
    return int(not any(row.resumes for row in rows))

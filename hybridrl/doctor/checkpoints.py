"""`python -m hybridrl.doctor checkpoints DIR`: every checkpoint of a run with its age, size, health and score.

Every byte is compared with the manifest, as when a run resumes.
"""

import contextlib
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from rich.table import Table

from hybridrl.checkpoint.files import faults
from hybridrl.checkpoint.store import is_verl, newest_good, read_checkpoint, saved_config, step_directories
from hybridrl.core.required import required
from hybridrl.doctor import directory_parser
from hybridrl.tracking.console import Terminal
from hybridrl.tracking.sink import LOSSES, REWARD, is_validation_score

SHOWN = 3  # damaged files of a checkpoint


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
    paths, saved = step_directories(directory), newest_good(directory, lambda text: None)
    metrics = {path: one.state["metrics"] if (one := read_checkpoint(path)) else {} for path in paths}
    name, sign = _score_name(directory, metrics.values())
    scores = {path: values[name] for path, values in metrics.items() if name in values}
    best = max(scores, key=lambda path: sign * scores[path], default=None)
    rows = []
    for path in paths:
        one, files = read_checkpoint(path), [file.stat() for file in path.rglob("*") if file.is_file()]
        kind = "verl" if is_verl(path) else "unreadable"
        if one is not None:
            kind = "recovery" if one.state["recovery"] else "kept"
        healthy = one is None or one.state["healthy"]
        rows.append(
            Row(
                step=int(path.name.removeprefix("global_step_")),
                age=time.time() - max((file.st_mtime for file in files), default=time.time()),
                size=sum(file.st_size for file in files),
                damaged=[] if kind == "verl" else faults(path),
                problem="" if healthy else required(one).state.get("reason", "no reason was recorded"),
                kind=kind,
                score=scores.get(path),
                best=path == best,
                resumes=saved is not None and path == saved.path,
            )
        )
    return rows, name


def _score_name(directory: Path, metrics: Iterable[dict[str, float]]) -> tuple[str, int]:
    """Return the metric to compare by, and -1 if less is better: that of keep_best_ckpt, or else of what was logged
    validation, reward or loss."""
    names = sorted({name for values in metrics for name in values})
    kept = str(saved_config(directory).get("trainer", {}).get("keep_best_ckpt") or "")
    wanted = [kept.removeprefix("-"), *filter(is_validation_score, names), *reversed(LOSSES), *REWARD]
    name = next((name for name in wanted if name in names), "")
    return name, -1 if name in LOSSES or (kept.startswith("-") and name == kept[1:]) else 1


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

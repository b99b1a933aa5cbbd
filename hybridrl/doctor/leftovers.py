"""Commands about what runs have left: `bundle` packs what a bug report needs, `checkpoints` lists a run's checkpoints,
`clean` removes what dead runs have left on this machine.

A bundle has configuration, faults, the last metrics, the ends of the logs, versions and the machine; no weights and no
data, and of samples and of the reward's log, which may show them, nothing unless requested. What looks like a secret is
masked in every file. In the list of checkpoints every byte is compared with the manifest, as when a run resumes.

A run cleans up after itself however it ends, and the next one after it; `clean` is for machines where neither could.
What a living process uses is never listed: a private directory is locked by its owner, a run's directory by its run.
Shared memory is mapped by its users, but those in another container are not visible here, so it is listed on request
only.
"""

import argparse
import contextlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

import psutil
import yaml
from rich.table import Table

from hybridrl.checkpoint.store import Store, holder
from hybridrl.doctor import Result
from hybridrl.doctor.why import diagnose
from hybridrl.runs.directory import CONFIG, SHOWN, RunDirectory
from hybridrl.runtime import keeper
from hybridrl.runtime.guard import oom_kills
from hybridrl.tracking.faults import FILE, last_lines
from hybridrl.tracking.records import CONFIGURED, open_records
from hybridrl.tracking.secrets import mask_text, mask_values, remember, without_users

ROWS, TAIL_BYTES = 200, 1 << 17  # rows of metrics, bytes of each log
QUIET_LOGS = ("train-", "rollout-")  # a reward may print samples into the others
VARIABLES = re.compile(r"(CUDA|NCCL|RAY|VLLM|HF|HUGGINGFACE|TORCH|PYTORCH|OMP|PYTHON|WANDB|HYBRIDRL|SLURM|LD)_?\w*")


def contents(directory: Path, *, samples: bool) -> Iterator[tuple[str, str]]:
    """Yield name and text of everything that is packed, unmasked."""
    yield "why.json", json.dumps(asdict(diagnose(directory)), indent=2)
    yield "machine.json", json.dumps(mask_values(_machine(directory)), indent=2)
    yield "packages.txt", "\n".join(sorted({f"{package.name}=={package.version}" for package in distributions()}))
    run, facts = RunDirectory(directory), ("healthy", "reason", "stopped", "recovery")
    states = {saved.step: {name: saved.state.get(name) for name in facts} for saved in run.checkpoints if saved.state}
    yield "checkpoints.json", json.dumps(states, indent=2)
    for name in (CONFIG, FILE):
        if (directory / name).is_file():
            text = (directory / name).read_text(encoding="utf-8", errors="replace")
            yield name, _values(text) if name == CONFIG else text
    if (metrics := directory / "metrics.jsonl").is_file():
        yield metrics.name, "".join(metrics.read_text(encoding="utf-8", errors="replace").splitlines(True)[-ROWS:])
    for log in sorted(directory.glob("logs/*.log")):
        if samples or log.name.startswith(QUIET_LOGS):
            yield f"logs/{log.name}", last_lines(log, TAIL_BYTES)
    if samples:
        yield from _samples(run)


def _values(text: str) -> str:
    """Mask by keys: not every form of YAML shows them in its text. A text that is not YAML stays as it is."""
    try:
        return yaml.safe_dump(mask_values(yaml.safe_load(text)), sort_keys=False, allow_unicode=True)
    except (yaml.YAMLError, RecursionError):
        return text


def _samples(run: RunDirectory) -> Iterator[tuple[str, str]]:
    """Yield the newest file of training and of validation samples."""
    for kind, name in CONFIGURED.items():
        if files := run.samples(kind):
            file_name, text = run.attempt(f"{kind}/", partial(_newest, files.values()), ("unreadable", ""))
            yield f"samples/{name}-{file_name}", text


def _newest(files: Iterable[Path]) -> tuple[str, str]:
    path = max(files, key=lambda file: file.stat().st_mtime)
    with open_records(path) as file:
        return path.name.removesuffix(".gz"), file.read()


def _machine(directory: Path) -> dict[str, object]:
    gpus = ""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv"]
        gpus = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": psutil.virtual_memory()._asdict(),
        "oom_kills": oom_kills(),
        "disk_free": shutil.disk_usage(directory).free,
        "gpus": gpus,
        "environment": {name: value for name, value in sorted(os.environ.items()) if VARIABLES.fullmatch(name)},
    }


def write_bundle(directory: Path, target: Path, *, samples: bool = False) -> list[str]:
    """Write the archive and return the names of its files."""
    names = []
    remember(RunDirectory(directory).config)
    with tarfile.open(target, "w:gz") as archive:
        for name, text in contents(directory, samples=samples):
            data = without_users(mask_text(text)).encode()
            entry = tarfile.TarInfo(f"{target.name.partition('.')[0]}/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(data))
            names.append(name)
    target.chmod(0o600)
    return names


def bundle(options: argparse.Namespace) -> Result:
    target = options.out or Path(f"bundle-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    names = write_bundle(options.directory, target, samples=options.samples)
    data = {"file": str(target), "size": target.stat().st_size, "contents": names}
    return Result(data, [f"{target} ({data['size'] / 1e3:.0f} kB): {', '.join(names)}"])


# -- checkpoints -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointRow:
    """A checkpoint: seconds since it was saved, bytes, damaged files, why it is not healthy (empty: it is), and its
    score if its state has one. `kind` is kept, recovery, verl or unreadable; `resumes`: `resume_mode=auto` takes it;
    `lacks`: parts that were not saved: a resuming run needs them, or starts without them."""

    step: int
    age: float
    size: int
    damaged: list[str]
    problem: str
    kind: str
    score: float | None
    best: bool
    resumes: bool
    lacks: str


def list_rows(directory: Path) -> tuple[list[CheckpointRow], str]:
    """Return the checkpoints by step, and the name of their score, empty if they have none."""
    run = RunDirectory(directory, checksums=True)
    name, sign, scores = run.scores()
    best, now = max(scores, key=lambda step: sign * scores[step], default=None), time.time()
    rows = [
        CheckpointRow(
            step=checkpoint.step,
            age=now - (checkpoint.written or now),
            size=checkpoint.size,
            damaged=checkpoint.damaged,
            problem=checkpoint.unhealthy,
            kind=checkpoint.kind,
            score=scores.get(checkpoint.step),
            best=checkpoint.step == best,
            resumes=checkpoint is run.newest,
            lacks=checkpoint.lacks or checkpoint.misses,
        )
        for checkpoint in run.checkpoints
    ]
    return rows, name


def _checkpoint_table(rows: list[CheckpointRow], name: str) -> Table:
    table = Table(title_justify="left")
    for column, side in (("step", "right"), ("age", "right"), ("size", "right"), ("state", "left")):
        table.add_column(column, justify=side, overflow="fold")
    table.add_column(name or "score", justify="right", overflow="fold")
    table.add_column("")
    for row in rows:
        files = "; ".join(row.damaged[:SHOWN]) + " ..." * (len(row.damaged) > SHOWN)
        state = [f"damaged: {files}"] * bool(files) + [f"not healthy: {row.problem}"] * bool(row.problem)
        score = "" if row.score is None else f"{row.score:.4g}{' (best)' * row.best}"
        kind = [row.kind] * (row.kind != "kept") + [row.lacks] * bool(row.lacks)
        cells = (
            str(timedelta(seconds=round(row.age))),
            f"{row.size / 1e6:,.1f} MB",
            "; ".join([*kind, *state] or ["intact"]),
        )
        table.add_row(str(row.step), *cells, score, "<- a run resumes here" if row.resumes else "", style=_style(row))
    return table


def _style(row: CheckpointRow) -> str:
    return "red" if row.damaged else "yellow" if row.problem else "bold" if row.resumes else ""


def checkpoints(options: argparse.Namespace) -> Result:
    rows, name = list_rows(options.directory)
    if not rows:
        print(f"{options.directory} has no checkpoints")
    data = {"score": name, "checkpoints": list(map(asdict, rows))}
    return Result(data, [_checkpoint_table(rows, name)] if rows else [], failed=not any(row.resumes for row in rows))


# -- clean -------------------------------------------------------------------------------------------------------------


SHARED = Path("/dev/shm")
# Segments of torch, named with their process, and of Python's multiprocessing, for vLLM.
SEGMENT = re.compile(r"torch_(?P<process>\d+)_.+|psm_[0-9a-f]+")
HIDDEN = re.compile(r"\.global_step_\d+\.(writing|deleting|replaced)")


def leftovers(directories: list[Path], shared_memory: Path | None, *, remove: bool) -> Iterator[str]:
    """Yield a line for each thing that is left, also in `shared_memory`, and remove it if `remove` is set."""
    for private in keeper.abandoned():
        pids = keeper.working_in(private)
        names = ", ".join(f"{pid} {_name(pid)}" for pid in pids)
        yield f"{private}{f', and its processes: {names}' if names else ''}"
        if remove:
            keeper.clear(private)
    for segment in _unused_segments(shared_memory) if shared_memory else ():
        yield f"{segment} ({segment.stat().st_size / 1e6:.1f} MB of shared memory)"
        if remove:
            segment.unlink(missing_ok=True)
    for directory in directories:
        hidden = [path for path in sorted(directory.iterdir()) if HIDDEN.fullmatch(path.name)]
        if hidden and not holder(directory):
            for path in hidden:
                size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                yield f"{path} ({size / 1e6:.1f} MB; published if it is complete)"
            if remove:
                with closing(Store(directory)):  # does so when it is opened
                    pass


def _name(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).name()
    return "(ended)"


def _unused_segments(shared: Path) -> list[Path]:
    """Return this user's shared memory that no process has mapped; a process in its name has ended."""
    unused = {}
    for path in shared.iterdir() if shared.is_dir() else ():
        match = SEGMENT.fullmatch(path.name)
        if match and path.stat().st_uid == os.getuid() and not psutil.pid_exists(int(match["process"] or -1)):
            unused[path.name] = path
    for process in Path("/proc").glob("[0-9]*") if unused else ():
        with contextlib.suppress(OSError):  # it has ended, or is another user's, who cannot map these
            for name in re.findall(rf"{shared}/(\S+)", (process / "maps").read_text()):
                unused.pop(name, None)
    return sorted(unused.values())


def clean(options: argparse.Namespace) -> Result:
    shared, state = SHARED if options.shared_memory else None, "removed" if options.yes else "left"
    lines = [*leftovers(options.directories, shared, remove=options.yes)]
    shown = [f"{state}: {line}" for line in lines] or ["nothing is left of dead runs"]
    left = bool(lines) and not options.yes
    return Result({state: lines}, [*shown, *["to remove it: add --yes"] * left], failed=left)

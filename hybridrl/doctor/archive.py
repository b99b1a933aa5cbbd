"""`python -m hybridrl.doctor bundle DIR`: packs what a bug report needs of a run, without weights, data or secrets.

Configuration, faults, the last metrics, the ends of the logs, versions and the machine. Of samples, and of the reward's
log, which may show them, nothing is packed unless requested. What looks like a secret is masked in every file.
"""

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
from dataclasses import asdict
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

import psutil
import yaml

from hybridrl.doctor import directory_parser
from hybridrl.doctor.why import diagnose
from hybridrl.runs.directory import CONFIG, RunDirectory
from hybridrl.runtime.guard import oom_kills
from hybridrl.tracking.faults import FILE, last_lines
from hybridrl.tracking.records import CONFIGURED, open_records
from hybridrl.tracking.secrets import mask_text, mask_values

ROWS, TAIL_BYTES = 200, 1 << 17  # of metrics, and of each log
QUIET_LOGS = ("train-", "rollout-")  # a reward may print samples into the others
VARIABLES = re.compile(r"(CUDA|NCCL|RAY|VLLM|HF|HUGGINGFACE|TORCH|PYTORCH|OMP|PYTHON|WANDB|HYBRIDRL|SLURM|LD)_?\w*")

USERS_HOME = re.compile(r"/(home|Users)/[^/\s\"':]+")


def mask(text: str) -> str:
    """Return a text without secrets and names of users."""
    home = os.path.expanduser("~")
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
    return USERS_HOME.sub(r"/\1/USER", mask_text(text))


def contents(directory: Path, *, samples: bool) -> Iterator[tuple[str, str]]:
    """Yield name and text of everything that is packed, unmasked."""
    yield "why.json", json.dumps(asdict(diagnose(directory)), indent=2)
    yield "machine.json", json.dumps(mask_values(_machine(directory)), indent=2)
    yield "packages.txt", "\n".join(sorted({f"{one.name}=={one.version}" for one in distributions()}))
    run, facts = RunDirectory(directory), ("healthy", "reason", "stopped", "recovery")
    states = {one.step: {name: one.state.get(name) for name in facts} for one in run.checkpoints if one.state}
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
    """Mask by keys, which a text does not show in every form of YAML; what is no YAML stays a text."""
    try:
        return yaml.safe_dump(mask_values(yaml.safe_load(text)), sort_keys=False, allow_unicode=True)
    except (yaml.YAMLError, RecursionError):
        return text


def _samples(run: RunDirectory) -> Iterator[tuple[str, str]]:
    """Yield the newest file of training and of validation samples."""
    for kind, name in CONFIGURED.items():
        if files := run.samples(kind):
            found, text = run.attempt(f"{kind}/", partial(_newest, files.values()), ("unreadable", ""))
            yield f"samples/{name}-{found}", text


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


def pack(directory: Path, target: Path, *, samples: bool = False) -> list[str]:
    """Write the archive and return the names of its files."""
    names = []
    with tarfile.open(target, "w:gz") as archive:
        for name, text in contents(directory, samples=samples):
            data = mask(text).encode()
            entry = tarfile.TarInfo(f"{target.name.partition('.')[0]}/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(data))
            names.append(name)
    target.chmod(0o600)
    return names


def main(argv: list[str]) -> int:
    parser = directory_parser(
        "bundle",
        "Pack configuration, faults, metrics, ends of logs, versions and machine for a bug report: no weights, no "
        "data, secrets masked. Look through it before you send it.",
    )
    parser.add_argument("--samples", action="store_true", help="also the newest samples and the reward's log")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: bundle-<time>.tar.gz in this directory")
    arguments = parser.parse_args(argv)
    directory = arguments.directory
    target = arguments.out or Path(f"bundle-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    names = pack(directory, target, samples=arguments.samples)
    print(f"{target} ({target.stat().st_size / 1e3:.0f} kB): {', '.join(names)}")
    return 0

"""What a merge leaves written about itself: `merge_report.json`."""

import hashlib
import json
import platform
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from hybridrl.checkpoint.resume import code_fingerprint
from hybridrl.model_merger.source import Source, type_name, type_names

REPORT = "merge_report.json"


def describe(source: Source, written: Path, target: Path) -> dict[str, Any]:
    """What was read, what lies in `written` and is to become `target`, and by what it was made."""
    step = re.fullmatch(r"global_step_(\d+)", source.directory.absolute().parent.name)
    return {
        "source": {
            "directory": str(source.directory.absolute()),
            "step": int(step[1]) if step else None,
            "form": source.tensors.form,
        }
        | _size(source.saved),
        "written": {
            "directory": str(target),
            "model": type(source.model).__name__,
            "dtype": type_name(source.dtype),
            "tied": source.tied,
        }
        | _size(source.meta),
        "files": files_in(written),
        "versions": code_fingerprint() | {"python": platform.python_version()},
        "peak_memory_bytes": _peak_memory(),
    }


def write_report(directory: Path, report: dict[str, Any]) -> None:
    (directory / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def earlier_files(target: Path) -> dict[Path, int]:
    """The files that an earlier merge wrote to a directory, with their sizes; none where there is no whole report."""
    try:
        report = target / REPORT
        files = json.loads(report.read_text(encoding="utf-8"))["files"]
        return {target / name: file["bytes"] for name, file in files.items()} | {report: report.stat().st_size}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def files_in(directory: Path) -> dict[str, dict[str, Any]]:
    """Size and checksum of every file below a directory, by its name there."""
    files = {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if path.is_file()}
    return {name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for name, path in files.items()}


def _size(meta: dict[str, Tensor]) -> dict[str, Any]:
    return {
        "tensors": len(meta),
        "parameters": sum(tensor.numel() for tensor in meta.values()),
        "bytes": sum(tensor.nbytes for tensor in meta.values()),
        "types": type_names(meta),
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _peak_memory() -> int:
    """Of this process so far, with the parts of files that it had mapped."""
    # getrusage would tell of the process that started this one, where that was the larger.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024

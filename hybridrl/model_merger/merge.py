"""Writing a Hugging Face directory: aside, checked there, and published by one rename."""

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME

from hybridrl.checkpoint.disk import publish
from hybridrl.checkpoint.export import SHARD_BYTES, write_shards
from hybridrl.config import ConfigError
from hybridrl.model_merger.blank_model import CONFIG
from hybridrl.model_merger.checks import check_damage, check_tensors, tracked
from hybridrl.model_merger.source import Source, type_names
from hybridrl.stopwatch import Stopwatch

REPORT = "merge_report.json"
# What of a `huggingface` folder is not carried along.
WEIGHTS = ("*.safetensors", "*.bin", SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME)


def merge(source: Source, target: Path, dtype: torch.dtype | None, *, limit: int = SHARD_BYTES) -> dict[str, Any]:
    """Write the model to a directory, in files of at most `limit` bytes, and check each tensor. Returns the report,
    which lies there too.

    Raises ConfigError where the directory may not be written, Unreadable or CheckFailed where something is damaged; the
    target is then as it was.
    """
    target = target.absolute()
    refuse_target(target, byte_count(source.meta(dtype)))
    aside, replaced = (target.with_name(f".{target.name}.{word}") for word in ("writing", "replaced"))
    watch = Stopwatch()
    shutil.rmtree(aside, ignore_errors=True)
    try:
        with watch("check"):
            check_damage(source)
        with watch("write"):
            write_model(source, aside, dtype, limit)
        with watch("check"):
            checked = check_tensors(source, aside, dtype)
        report = _report(source, aside, target, dtype) | {
            "checked": {"tensors": checked},
            "seconds": {name.removeprefix("timing_s/"): round(seconds, 3) for name, seconds in watch.take().items()},
            "peak_memory_bytes": peak_memory(),
        }
        write_report(aside, report)
        publish(aside, target, replaced)
    finally:
        for path in (aside, replaced):
            shutil.rmtree(path, ignore_errors=True)
    return report


def refuse_target(target: Path, size: int) -> None:
    """Refuse a directory with files of something else, and a disk that is too small."""
    if target.exists() and not (target / REPORT).is_file() and (target.is_file() or any(target.iterdir())):
        raise ConfigError(f"{target} is there and not of an earlier merge; name another --target_dir, or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < size:
        raise ConfigError(
            f"{target.parent} has {free / 1e9:.1f} GB free, and the model takes {size / 1e9:.1f}; make room, name "
            f"another --target_dir, or write a smaller --dtype"
        )


def write_model(source: Source, directory: Path, dtype: torch.dtype | None, limit: int = SHARD_BYTES) -> None:
    """Weights, configuration, and what lies beside it: generation config, tokenizer, chat template."""
    shutil.copytree(source.huggingface, directory, ignore=shutil.ignore_patterns(*WEIGHTS, REPORT))
    (directory / CONFIG).write_text(json.dumps(source.settings(dtype), indent=2) + "\n", encoding="utf-8")
    pieces = (
        (name, first, piece) for name in tracked(source.names, "writing") for first, piece in source.pieces(name, dtype)
    )
    write_shards(directory, source.meta(dtype), pieces, limit)


def _report(source: Source, written: Path, target: Path, dtype: torch.dtype | None) -> dict[str, Any]:
    meta, saved = source.meta(dtype), source.meta(None)
    return {
        "read": {
            "directory": str(source.directory.absolute()),
            "form": source.tensors.form,
            "bytes": byte_count(saved),
            "types": type_names(saved),
        },
        "written": {
            "directory": str(target),
            "model": type(source.model).__name__,
            "tensors": len(meta),
            "parameters": sum(tensor.numel() for tensor in meta.values()),
            "bytes": byte_count(meta),
            "types": type_names(meta),
            "tied": source.tied,
            "files": {path.name: path.stat().st_size for path in sorted(written.iterdir())},
        },
    }


def byte_count(meta: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in meta.values())


def write_report(directory: Path, report: dict[str, Any]) -> None:
    (directory / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def peak_memory() -> int:
    """Of this process so far, in bytes, with what it mapped of files."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

"""Writing a Hugging Face directory: aside, checked there, and published by one rename."""

import json
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME

from hybridrl.checkpoint.disk import publish
from hybridrl.checkpoint.write import SHARD_BYTES, write_shards
from hybridrl.config import ConfigError
from hybridrl.config.model_directory import ADAPTER_CONFIG, resolve_model
from hybridrl.model_merger.blank_model import CONFIG
from hybridrl.model_merger.checks import Check, check_damage, check_tensors, tracked
from hybridrl.model_merger.report import REPORT, describe, earlier_files, write_report
from hybridrl.model_merger.source import Source
from hybridrl.runtime.timer import Stopwatch

# What of a `huggingface` folder is not carried along.
WEIGHTS = ("*.safetensors", "*.bin", SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME)
# And of the directory of an adapter's base, which may be a repository.
OTHERS = (ADAPTER_CONFIG, ".*", "*.gguf", "*.pth", "*.md", "original")


def merge(
    source: Source, target: Path, further: dict[str, Check] | None = None, *, limit: int = SHARD_BYTES
) -> dict[str, Any]:
    """Write the model to a directory, in files of at most `limit` bytes; check each tensor, and `further` by name.
    Returns the report, which lies there too.

    Raises ConfigError where the directory may not be written, Unreadable or CheckFailed where something is damaged; the
    target is then as it was.
    """
    target = target.absolute()
    aside, replaced = (target.with_name(f".{target.name}.{word}") for word in ("writing", "replaced"))
    if replaced.is_dir() and not target.exists():
        replaced.replace(target)  # a merge was killed between its last two renames
    refuse_target(target, byte_count(source.meta))
    watch, checked = Stopwatch(), {}
    shutil.rmtree(aside, ignore_errors=True)
    try:
        with watch("check"):
            checked["source"] = check_damage(source)
        with watch("write"):
            write_model(source, aside, limit)
        with watch("check"):
            checked["tensors"] = check_tensors(source, aside)
            checked |= {name: check(source, aside) for name, check in (further or {}).items()}
            report = describe(source, aside, target)
        seconds = {name.removeprefix("timing_s/"): round(taken, 3) for name, taken in watch.take().items()}
        report |= {"checked": checked, "seconds": seconds}
        write_report(aside, report)
        publish(aside, target, replaced)
    finally:
        for path in (aside, replaced):
            shutil.rmtree(path, ignore_errors=True)
    return report


def refuse_target(target: Path, size: int) -> None:
    """Refuse a directory with files that no merge wrote, and a disk that is too small."""
    earlier = earlier_files(target)
    found = sorted(path for path in target.rglob("*") if path.is_file()) if target.is_dir() else [target]
    others = [path for path in found if path.exists() and earlier.get(path) != path.stat().st_size]
    if others:
        raise ConfigError(
            f"--target_dir={target}: {others[0]} is there, and no merge wrote it; move it away, or name another one"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < size:
        raise ConfigError(
            f"{target.parent} has {free / 1e9:.1f} GB free, and the model takes {size / 1e9:.1f}; make room, name "
            f"another --target_dir, or write a smaller --dtype"
        )


def write_model(source: Source, directory: Path, limit: int = SHARD_BYTES) -> None:
    """Weights, configuration, and what lies beside it: generation config, tokenizer, chat template, code."""
    ignore = shutil.ignore_patterns(*WEIGHTS, *OTHERS, REPORT)
    for place in dict.fromkeys((source.huggingface, resolve_model(str(source.directory)))):
        shutil.copytree(place, directory, ignore=ignore, dirs_exist_ok=True)
    (directory / CONFIG).write_text(json.dumps(source.settings(), indent=2) + "\n", encoding="utf-8")
    names = tracked(source.names, "writing")
    pieces = ((name, first, piece) for name in names for first, piece in source.tensors.pieces(name))
    write_shards(directory, source.meta, pieces, limit)


def byte_count(meta: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in meta.values())

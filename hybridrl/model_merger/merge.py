"""Write a Hugging Face directory: in a hidden directory, checked there with a report, and published by one rename.

`run` carries out a command of the merger: its output, its exit status, and the upload to the Hugging Face hub.
"""

import argparse
import hashlib
import json
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME, logging

from hybridrl.checkpoint.export import SHARD_BYTES, write_shards
from hybridrl.checkpoint.files import forget_missing_code, publish
from hybridrl.checkpoint.read import ADAPTER_WEIGHTS, Adapter, read_safetensors
from hybridrl.checkpoint.resume import code_fingerprint
from hybridrl.checkpoint.tensors import Unreadable
from hybridrl.config import ConfigError
from hybridrl.config.files import ADAPTER_CONFIG, resolve_model
from hybridrl.model_merger.card import CARD, write_card
from hybridrl.model_merger.source import (
    CONFIG,
    CheckFailed,
    MergeSource,
    ParityCheck,
    check_damage,
    check_merged_weights,
    check_tensors,
    compare_models,
    open_source,
    tracked,
    type_name,
    type_names,
)
from hybridrl.runtime import EXIT_FAILED, EXIT_REJECTED
from hybridrl.tracking import Stopwatch
from hybridrl.tracking.console import print_text

ADAPTER_FOLDER = "lora_adapter"  # in a merged model that is written with its adapter; verl's name
REPORT = "merge_report.json"
# Files that are not copied from a `huggingface` directory.
WEIGHTS = ("*.safetensors", "*.bin", SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME)
# Further files that are not copied from the directory of an adapter's base (it may be a repository).
OTHERS = (ADAPTER_CONFIG, ".*", "*.gguf", "*.pth", "*.md", "original")


def run(arguments: argparse.Namespace, further: ParityCheck | None = None, hub: HfApi | None = None) -> int:
    """Carry out a command and return its exit status. `further`: a requested check; `hub`: where to upload."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        options = {"value_model": arguments.is_value_model, "trusted": arguments.trust_remote_code}
        name = vars(arguments).get("dtype")
        dtype = getattr(torch, name) if name else None
        source = open_source(arguments.local_dir, dtype, base=arguments.base, **options)
        model = type(source.model).__name__
        print(f"{arguments.local_dir}: {model}, {len(source.names)} tensors {source.tensors.form}")
        if arguments.operation == "test":
            print(f"{arguments.test_hf_dir}: {compare_models(source, arguments.test_hf_dir)}")
        elif source.adapter and arguments.lora == "adapter":
            check_damage(source)
            print(f"{arguments.target_dir}: {publish_adapter(source.adapter, arguments.target_dir)}")
        else:
            _merge(source, arguments, further, hub)
    except (Unreadable, CheckFailed, OSError) as error:
        print_text(f"failed: {error}", error=True)
        return EXIT_FAILED
    except ConfigError as error:
        print_text(f"error: {error}", error=True)
        return EXIT_REJECTED
    return 0


def _merge(source: MergeSource, arguments: argparse.Namespace, further: ParityCheck | None, hub: HfApi | None) -> None:
    repository, target = arguments.hf_upload_path, arguments.target_dir
    if repository and hub is None and get_token() is None:
        fix = "set HF_TOKEN to one that may write to it"
        raise ConfigError(f"--hf_upload_path={repository} needs a token", fix=fix)
    checks: dict[str, ParityCheck] = {"adapter": check_merged_weights} if source.adapter else {}
    if further:
        checks[arguments.verify] = further
    if source.adapter and arguments.lora == "both":
        checks[ADAPTER_FOLDER] = lambda _, writing: write_adapter(source.adapter, writing / ADAPTER_FOLDER)
    earlier = earlier_files(target)
    report = merge(source, target, checks)
    if earlier:
        print(f"{target}: replaced an earlier merge")
    saved, written, seconds = report["source"], report["written"], report["seconds"]
    rounded = f", saved as {saved['types']}" if saved["types"] != written["types"] else ""
    print(
        f"{written['directory']}: {written['parameters']:,} parameters as {written['types']}{rounded}, "
        f"{written['bytes'] / 1e9:.2f} GB in {seconds['write']:.1f} s, "
        f"peak memory {report['peak_memory_bytes'] / 1e9:.2f} GB"
    )
    results = "; ".join(f"{name}: {result}" for name, result in report["checked"].items())
    print(f"checked in {seconds['check']:.1f} s: {results}; for details see {REPORT}")
    if not repository:
        return
    try:  # creates the repository if needed
        hub = hub or HfApi()
        hub.create_repo(repo_id=repository, private=arguments.private, exist_ok=True)
        ignored = [REPORT, *[CARD] * hub.file_exists(repository, CARD)]  # a card there may be somebody's work
        address = hub.upload_folder(folder_path=target, repo_id=repository, ignore_patterns=ignored)
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--hf_upload_path={repository}: {reason}; the merged model is in {target}") from error
    print(f"uploaded to {address}")


def merge(
    source: MergeSource, target: Path, further: dict[str, ParityCheck] | None = None, *, limit: int = SHARD_BYTES
) -> dict[str, Any]:
    """Write the model to a directory, in files of at most `limit` bytes; check each tensor, then run the `further`
    checks. Returns the report, which is written there too. Raises ConfigError if the directory must not be written,
    Unreadable or CheckFailed if something is damaged; the target is then unchanged."""
    target = target.absolute()
    watch, checked = Stopwatch(), {}
    with _publishing(target, source.meta) as writing:
        with watch("check"):
            checked["source"] = check_damage(source)
        with watch("write"):
            write_model(source, writing, limit)
            write_card(writing, source.directory, generates=not source.is_value_model)
        with watch("check"):
            checked["tensors"] = check_tensors(source, writing)
            checked |= {name: check(source, writing) for name, check in (further or {}).items()}
            report = _describe(source, writing, target)
        seconds = {name.removeprefix("timing_s/"): round(taken, 3) for name, taken in watch.take().items()}
        report |= {"checked": checked, "seconds": seconds}
        _write_report(writing, report)
    return report


def write_model(source: MergeSource, directory: Path, limit: int = SHARD_BYTES) -> None:
    """Write weights, configuration and the files next to it: generation config, tokenizer, chat template, code."""
    ignore = shutil.ignore_patterns(*WEIGHTS, *OTHERS, REPORT)
    for path in dict.fromkeys((source.huggingface, resolve_model(str(source.directory)))):
        shutil.copytree(path, directory, ignore=ignore, dirs_exist_ok=True)
    (directory / CONFIG).write_text(json.dumps(source.settings(), indent=2) + "\n", encoding="utf-8")
    forget_missing_code(directory)
    names = tracked(source.names, "writing")
    pieces = ((name, first, piece) for name in names for first, piece in source.tensors.pieces(name))
    write_shards(directory, source.meta, pieces, limit)


def write_adapter(adapter: Adapter, directory: Path) -> str:
    """Write an adapter in peft's layout and read it back; return a description of the result."""
    ignore = shutil.ignore_patterns("*.safetensors", REPORT)
    shutil.copytree(resolve_model(str(adapter.directory)), directory, ignore=ignore)
    tensors = {name: adapter.tensors.read(name) for name in adapter.tensors.meta}
    save_file(tensors, directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    written = read_safetensors(directory, ADAPTER_WEIGHTS)
    differing = [name for name, tensor in tensors.items() if not torch.equal(written.read(name), tensor)]
    if differing or not (directory / ADAPTER_CONFIG).is_file():
        raise CheckFailed(f"{len(differing)} tensors of the adapter differ from what was read")
    return f"an adapter of rank {adapter.settings['r']}, {len(tensors)} tensors equal bit for bit"


def publish_adapter(adapter: Adapter, target: Path) -> str:
    """Write an adapter by itself, as `merge` writes a model, with the same errors; return a description."""
    with _publishing(target.absolute(), adapter.tensors.meta) as writing:
        result = write_adapter(adapter, writing)
        write_card(writing, adapter.directory, adapter=True)
        source = {"directory": str(adapter.directory.absolute()), "form": adapter.tensors.form}
        _write_report(writing, {"source": source, "files": _files_in(writing), "checked": {"tensors": result}})
    return result


@contextmanager
def _publishing(target: Path, meta: dict[str, Tensor]) -> Iterator[Path]:
    """Yield a hidden directory that replaces the target by one rename at the end, or is removed on any error. A model
    card that was edited since an earlier merge is kept."""
    writing, replaced = (target.with_name(f".{target.name}.{suffix}") for suffix in ("writing", "replaced"))
    if replaced.is_dir() and not target.exists():
        replaced.replace(target)  # an earlier merge was killed between its last two renames
    # Only files of an earlier merge are replaced, and the disk must have enough space.
    earlier = earlier_files(target)
    existing = sorted(path for path in target.rglob("*") if path.is_file()) if target.is_dir() else [target]
    card = _edited_card(target)
    others = [path for path in existing if path.exists() and earlier.get(path) != path.stat().st_size]
    if others := [path for path in others if path != target / CARD or card is None]:
        cause = f"--target_dir={target}: {others[0]} exists, and no merge wrote it"
        raise ConfigError(cause, fix="move it away, or name another directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    free, size = shutil.disk_usage(target.parent).free, sum(tensor.nbytes for tensor in meta.values())
    if free < size:
        cause = f"{target.parent} has {free / 1e9:.1f} GB free, and the model takes {size / 1e9:.1f}"
        raise ConfigError(cause, fix="free some space, name another --target_dir, or write a smaller --dtype")
    shutil.rmtree(writing, ignore_errors=True)
    try:
        yield writing
        if card is not None:
            (writing / CARD).write_bytes(card)
        publish(writing, target, replaced)
    finally:
        for path in (writing, replaced):
            shutil.rmtree(path, ignore_errors=True)


def earlier_files(target: Path) -> dict[Path, int]:
    """Return the files that an earlier merge wrote to a directory, with their sizes; empty without its report."""
    try:
        report = target / REPORT
        files = json.loads(report.read_text(encoding="utf-8"))["files"]
        return {target / name: file["bytes"] for name, file in files.items()} | {report: report.stat().st_size}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _edited_card(target: Path) -> bytes | None:
    """Return the model card of an earlier merge in a directory, None if it is as the merge wrote it, or not there."""
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        files, card = json.loads((target / REPORT).read_text(encoding="utf-8"))["files"], (target / CARD).read_bytes()
        return card if hashlib.sha256(card).hexdigest() != files[CARD]["sha256"] else None
    return None


def _describe(source: MergeSource, written: Path, target: Path) -> dict[str, Any]:
    """Return the report: the source, the contents of `written` (the later `target`), and the versions used."""
    step = re.fullmatch(r"global_step_(\d+)", source.directory.absolute().parent.name)
    read = {"directory": str(source.directory.absolute()), "step": int(step[1]) if step else None}
    model = {"directory": str(target), "model": type(source.model).__name__, "dtype": type_name(source.dtype)}
    # Peak memory with mapped parts of files; getrusage would report the parent process's peak if that was larger.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return {
        "source": read | {"form": source.tensors.form} | _size(source.saved),
        "written": model | {"tied": source.tied} | _size(source.meta),
        "files": _files_in(written),
        "versions": code_fingerprint() | {"python": platform.python_version()},
        "peak_memory_bytes": int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024,
    }


def _write_report(directory: Path, report: dict[str, Any]) -> None:
    (directory / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _files_in(directory: Path) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of every file below a directory, by relative name."""
    files = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        files[path.relative_to(directory).as_posix()] = {"bytes": path.stat().st_size, "sha256": digest}
    return files


def _size(meta: dict[str, Tensor]) -> dict[str, Any]:
    return {
        "tensors": len(meta),
        "parameters": sum(tensor.numel() for tensor in meta.values()),
        "bytes": sum(tensor.nbytes for tensor in meta.values()),
        "types": type_names(meta),
    }

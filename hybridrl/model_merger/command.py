"""Run a command of the merger: its output, its exit status, and the upload to the Hugging Face hub."""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError
from transformers.utils import logging

from hybridrl.checkpoint.tensors import Unreadable
from hybridrl.config import ConfigError
from hybridrl.config.files import holds_adapter
from hybridrl.model_merger.checks import Check, check_adapter, check_damage, compare
from hybridrl.model_merger.merge import REPORT, earlier_files, merge, publish_adapter, write_adapter
from hybridrl.model_merger.source import AdaptedModel, CheckFailed, Source, open_adapted, open_source

EXIT_FAILED, EXIT_ERROR = 1, 2
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ADAPTER_FOLDER = "lora_adapter"  # in a merged model that is written with its adapter; verl's name


def run(arguments: argparse.Namespace, further: Check | None = None, hub: HfApi | None = None) -> int:
    """Carry out a command and return its exit status. `further`: the requested check in addition to that of the
    tensors; `hub`: where to upload."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        options = {"value_model": arguments.is_value_model, "trusted": arguments.trust_remote_code}
        dtype, adapted = DTYPES.get(vars(arguments).get("dtype")), None
        if holds_adapter(str(arguments.local_dir)):
            adapted = open_adapted(arguments.local_dir, arguments.base)
            source = adapted.source(dtype, **options)
        else:
            source = open_source(arguments.local_dir, dtype, **options)
        model = type(source.model).__name__
        print(f"{arguments.local_dir}: {model}, {len(source.names)} tensors {source.tensors.form}")
        if arguments.operation == "test":
            print(f"{arguments.test_hf_dir}: {compare(source, arguments.test_hf_dir)}")
        elif adapted and arguments.lora == "adapter":
            check_damage(source)
            print(f"{arguments.target_dir}: {publish_adapter(adapted.adapter, arguments.target_dir)}")
        else:
            _merge(source, arguments, further, hub, adapted)
    except (Unreadable, CheckFailed, OSError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return EXIT_FAILED
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    return 0


def _merge(
    source: Source,
    arguments: argparse.Namespace,
    further: Check | None,
    hub: HfApi | None,
    adapted: AdaptedModel | None,
) -> None:
    repository, target = arguments.hf_upload_path, arguments.target_dir
    if repository and hub is None and get_token() is None:
        raise ConfigError(
            f"--hf_upload_path={repository} needs a token", fix="set HF_TOKEN to one that may write to it"
        )
    checks: dict[str, Check] = {"adapter": partial(check_adapter, adapted)} if adapted else {}
    if further:
        checks[arguments.verify] = further
    if adapted and arguments.lora == "both":
        checks[ADAPTER_FOLDER] = lambda _, writing: write_adapter(adapted.adapter, writing / ADAPTER_FOLDER)
    earlier = earlier_files(target)
    report = merge(source, target, checks)
    if earlier:
        print(f"{target}: replaced an earlier merge")
    _print_report(report)
    if repository:
        print(f"uploaded to {_upload(target, repository, private=arguments.private, hub=hub or HfApi())}")


def _print_report(report: dict[str, Any]) -> None:
    saved, written, seconds = report["source"], report["written"], report["seconds"]
    rounded = f", saved as {saved['types']}" if saved["types"] != written["types"] else ""
    print(
        f"{written['directory']}: {written['parameters']:,} parameters as {written['types']}{rounded}, "
        f"{written['bytes'] / 1e9:.2f} GB in {seconds['write']:.1f} s, "
        f"peak memory {report['peak_memory_bytes'] / 1e9:.2f} GB"
    )
    results = "; ".join(f"{name}: {result}" for name, result in report["checked"].items())
    print(f"checked in {seconds['check']:.1f} s: {results}; for details see {REPORT}")


def _upload(directory: Path, repository: str, *, private: bool, hub: HfApi) -> str:
    """Upload a merged directory, creating the repository if needed; return its address."""
    try:
        hub.create_repo(repo_id=repository, private=private, exist_ok=True)
        return str(hub.upload_folder(folder_path=directory, repo_id=repository, ignore_patterns=[REPORT]))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--hf_upload_path={repository}: {reason}; the merged model is in {directory}") from error

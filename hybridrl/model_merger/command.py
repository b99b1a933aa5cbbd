"""Carrying out a command: what is said of it, and with which status it ends."""

import argparse
import sys
from typing import Any

import torch
from huggingface_hub import HfApi
from transformers.utils import logging

from hybridrl.checkpoint.tensors import Unreadable
from hybridrl.config import ConfigError
from hybridrl.model_merger.checks import Check, compare
from hybridrl.model_merger.merge import merge
from hybridrl.model_merger.report import REPORT, earlier_files
from hybridrl.model_merger.source import CheckFailed, Source, open_source
from hybridrl.model_merger.upload import refuse_without_token, upload

EXIT_FAILED, EXIT_REFUSED = 1, 2
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def run(arguments: argparse.Namespace, further: Check | None = None, hub: HfApi | None = None) -> int:
    """`further` is the check that was asked for beyond that of the tensors, `hub` where to upload to."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        source = open_source(
            arguments.local_dir,
            DTYPES.get(vars(arguments).get("dtype")),
            value_model=arguments.is_value_model,
            trusted=arguments.trust_remote_code,
        )
        print(
            f"{arguments.local_dir}: {type(source.model).__name__}, {len(source.names)} tensors {source.tensors.form}"
        )
        if arguments.operation == "test":
            print(f"{arguments.test_hf_dir}: {compare(source, arguments.test_hf_dir)}")
        else:
            _merge(source, arguments, further, hub)
    except (Unreadable, CheckFailed, OSError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return EXIT_FAILED
    except ConfigError as error:
        print(f"refused: {error}", file=sys.stderr)
        return EXIT_REFUSED
    return 0


def _merge(source: Source, arguments: argparse.Namespace, further: Check | None, hub: HfApi | None) -> None:
    if arguments.hf_upload_path and hub is None:
        refuse_without_token()
    target, before = arguments.target_dir, earlier_files(arguments.target_dir)
    report = merge(source, target, {arguments.verify: further} if further else None)
    if before:
        print(f"{target}: an earlier merge was there and is replaced")
    _tell(report)
    if arguments.hf_upload_path:
        address = upload(target, arguments.hf_upload_path, private=arguments.private, hub=hub or HfApi())
        print(f"uploaded to {address}")


def _tell(report: dict[str, Any]) -> None:
    saved, written, seconds = report["source"], report["written"], report["seconds"]
    rounded = f", saved as {saved['types']}" if saved["types"] != written["types"] else ""
    print(
        f"{written['directory']}: {written['parameters']:,} parameters as {written['types']}{rounded}, "
        f"{written['bytes'] / 1e9:.2f} GB in {seconds['write']:.1f} s, "
        f"peak memory {report['peak_memory_bytes'] / 1e9:.2f} GB"
    )
    found = "; ".join(f"{name}: {words}" for name, words in report["checked"].items())
    print(f"checked in {seconds['check']:.1f} s: {found}; {REPORT} tells more")

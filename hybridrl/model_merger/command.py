"""Carrying out a command: what is said of it, and with which status it ends."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from transformers.utils import logging

from hybridrl.checkpoint.tensors import Unreadable
from hybridrl.config import ConfigError
from hybridrl.model_merger.checks import compare
from hybridrl.model_merger.merge import REPORT, merge, write_report
from hybridrl.model_merger.source import CheckFailed, Source, open_source
from hybridrl.model_merger.upload import refuse_without_token, upload

EXIT_FAILED, EXIT_REFUSED = 1, 2
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Check = Callable[[Source, Path, torch.dtype | None], str]


def run(arguments: argparse.Namespace, further: Check | None = None, hub: HfApi | None = None) -> int:
    """`further` is a check that follows that of the tensors, `hub` where to upload to."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        source = open_source(
            arguments.local_dir, value_model=arguments.is_value_model, trusted=arguments.trust_remote_code
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
    target, dtype = arguments.target_dir, DTYPES.get(arguments.dtype)
    report = merge(source, target, dtype)
    _tell(report)
    if further is not None:
        try:
            report["checked"][arguments.verify] = further(source, target, dtype)
        except CheckFailed as error:
            report["checked"][arguments.verify] = f"failed: {error}"
            raise
        finally:
            write_report(target, report)
        print(f"in {arguments.verify}: {report['checked'][arguments.verify]}")
    if arguments.hf_upload_path:
        address = upload(target, arguments.hf_upload_path, private=arguments.private, hub=hub or HfApi())
        print(f"uploaded to {address}")


def _tell(report: dict[str, Any]) -> None:
    written, seconds = report["written"], report["seconds"]
    print(
        f"{written['directory']}: {written['parameters']:,} parameters as {written['types']}, "
        f"{written['bytes'] / 1e9:.2f} GB in {seconds['write']:.1f} s, "
        f"peak memory {report['peak_memory_bytes'] / 1e9:.2f} GB"
    )
    print(f"checked in {seconds['check']:.1f} s: {report['checked']['tensors']}; {REPORT} tells more")

"""Carrying out a command: what is said of it, and with which status it ends."""

import argparse
import sys
from functools import partial
from typing import Any

import torch
from huggingface_hub import HfApi
from transformers.utils import logging

from hybridrl.checkpoint.tensors import Unreadable
from hybridrl.config import ConfigError
from hybridrl.config.model_directory import holds_adapter
from hybridrl.model_merger.checks import Check, check_damage, compare
from hybridrl.model_merger.lora import SUBFOLDER, Parts, check_merged, open_parts, publish_adapter, write_adapter
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
        options = {"value_model": arguments.is_value_model, "trusted": arguments.trust_remote_code}
        dtype, parts = DTYPES.get(vars(arguments).get("dtype")), None
        if holds_adapter(str(arguments.local_dir)):
            parts = open_parts(arguments.local_dir, arguments.base)
            source = parts.source(dtype, **options)
        else:
            source = open_source(arguments.local_dir, dtype, **options)
        print(
            f"{arguments.local_dir}: {type(source.model).__name__}, {len(source.names)} tensors {source.tensors.form}"
        )
        if arguments.operation == "test":
            print(f"{arguments.test_hf_dir}: {compare(source, arguments.test_hf_dir)}")
        elif parts and arguments.lora == "adapter":
            check_damage(source)
            print(f"{arguments.target_dir}: {publish_adapter(parts.adapter, arguments.target_dir)}")
        else:
            _merge(source, arguments, further, hub, parts)
    except (Unreadable, CheckFailed, OSError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return EXIT_FAILED
    except ConfigError as error:
        print(f"refused: {error}", file=sys.stderr)
        return EXIT_REFUSED
    return 0


def _merge(
    source: Source, arguments: argparse.Namespace, further: Check | None, hub: HfApi | None, parts: Parts | None
) -> None:
    if arguments.hf_upload_path and hub is None:
        refuse_without_token()
    target, before = arguments.target_dir, earlier_files(arguments.target_dir)
    report = merge(source, target, _checks(arguments, further, parts))
    if before:
        print(f"{target}: an earlier merge was there and is replaced")
    _tell(report)
    if arguments.hf_upload_path:
        address = upload(target, arguments.hf_upload_path, private=arguments.private, hub=hub or HfApi())
        print(f"uploaded to {address}")


def _checks(arguments: argparse.Namespace, further: Check | None, parts: Parts | None) -> dict[str, Check]:
    """What is done with a directory before it is published, in this order."""
    checks: dict[str, Check] = {"adapter": partial(check_merged, parts)} if parts else {}
    if further:
        checks[arguments.verify] = further
    if parts and arguments.lora == "both":
        checks[SUBFOLDER] = lambda source, aside: write_adapter(parts.adapter, aside / SUBFOLDER)
    return checks


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

"""A model behind an OpenAI-compatible endpoint: `hybridrl serve model.path=...`

Keys are those of a run below actor_rollout_ref, such as model.path and rollout.max_model_len, and OWN.
"""

import asyncio
import difflib
import os
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hybridrl import project_file
from hybridrl.agents.endpoint import ADMIN_KEY, bound
from hybridrl.config import ConfigError
from hybridrl.config.checks.engine import check_engine_name
from hybridrl.config.checks.model import resolve_dtype
from hybridrl.config.checks.training import this_machine
from hybridrl.config.compose import as_override, read_argument
from hybridrl.config.files import holds_adapter
from hybridrl.config.findings import Finding, Findings
from hybridrl.config.load import read_config
from hybridrl.config.schema import ServedConfig, ServingConfig
from hybridrl.model_merger import base_model, whole_model
from hybridrl.plugins import load
from hybridrl.runtime import EXIT_FAILED, EXIT_REJECTED
from hybridrl.runtime.environment import reject_foreign_builds, worker_environment
from hybridrl.runtime.guard import ended_by_closed_pipe
from hybridrl.runtime.keeper import work_in_private

SECTION = "actor_rollout_ref."
DEVICES, LARGEST_PORT = ("auto", "cpu", "cuda"), 65535
OWN = {"port": "8000", "host": "127.0.0.1", "served_model_name": "policy", "device": "auto"}
USAGE = f"""usage: hybridrl serve model.path=MODEL [key=value ...]

Serve a Hugging Face model, or a model of a checkpoint of hybridrl or verl, with OpenAI's API
({project_file("docs/endpoint.md")}).
Keys: {", ".join(f"{key}={value}" for key, value in OWN.items())}, and those of a run
below {SECTION[:-1]}, such as rollout.max_model_len, rollout.max_num_seqs, rollout.tensor_model_parallel_size.
"""


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or {"-h", "--help"} & {*arguments}:
        with ended_by_closed_pipe():
            print(USAGE)
        return 0 if arguments else EXIT_REJECTED
    try:
        own, section = read_arguments(arguments)
        if cause := run(own, section):
            print(f"error: serving ended: {cause}; start it again", file=sys.stderr)
            return EXIT_FAILED
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_REJECTED
    return 0


def read_arguments(arguments: list[str]) -> tuple[dict[str, str], ServedConfig]:
    """Return the values of the command's own keys and the section of a run; ConfigError lists all that is wrong. Of a
    LoRA adapter, which will be merged, the base model is checked."""
    values = {key: value for key, _, value in (text.partition("=") for text in arguments) if key in OWN}
    others = [text for text in arguments if text.partition("=")[0] not in OWN]
    paths = [str(read_argument(text).value) for text in others if text.removeprefix(SECTION).startswith("model.path=")]
    adapter = next((path for path in paths[-1:] if holds_adapter(path)), "")
    if adapter:
        others.append(f"model.path={as_override(base_model(adapter, 'model.path'))}")
    result = read_config(ServingConfig, [f"{SECTION}{text.removeprefix(SECTION)}" for text in others])
    if result.config is not None:
        check_engine_name(result.config.actor_rollout_ref.rollout.name, result.findings)
    result.findings.items = [_by_own_name(finding) for finding in result.findings.items]
    _check_own(values, result.findings)
    section = result.accept(partial(print, "warning:", file=sys.stderr)).actor_rollout_ref
    section.model.path = adapter or section.model.path
    return OWN | values, section


def _check_own(values: dict[str, str], findings: Findings) -> None:
    port, device = values.get("port", "0"), values.get("device", "auto")
    if not port.isdecimal() or int(port) > LARGEST_PORT:
        cause = f"port={port} must be a number from 0 to {LARGEST_PORT}"
        findings.error("value", cause, "set port=8000, or 0 for a free one", keys="port")
    if device not in DEVICES:
        findings.error("value", f"device={device}: choose {' | '.join(DEVICES)}", keys="device")
    for key in ("host", "served_model_name"):
        if not values.get(key, OWN[key]):
            findings.error("value", f"{key}= is empty", f"set {key}={OWN[key]}", keys=key)


def _by_own_name(finding: Finding) -> Finding:
    """Return a finding about an unknown key under the name that the user wrote, with a similar key of this command as
    its fix."""
    if finding.code != "unknown-key":
        return finding
    name = finding.keys[0].removeprefix(SECTION)
    own = difflib.get_close_matches(name, OWN, n=1, cutoff=0.7)
    return replace(finding, cause=f"unknown key {name}", fix=f"did you mean {own[0]}?" if own else finding.fix)


def run(own: dict[str, str], section: ServedConfig) -> str:
    """Serve until the process is stopped; returns why it ended otherwise."""
    source, listening = section.model.path, bound(own["host"], int(own["port"]))  # before anything that takes long
    entry, device = prepare(section, own["device"])
    from hybridrl.agents.endpoint.local import serve

    options = {"host": own["host"], "name": own["served_model_name"], "source": source}
    options |= {"admin_key": os.environ.get(ADMIN_KEY)}
    return asyncio.run(serve(entry, section.model, section.rollout, device, listening=listening, **options))


def prepare(section: ServedConfig, device: str) -> tuple[Any, str]:
    """Make this process ready for an engine, and return its EngineEntry and device. Shards and adapters are merged
    into a temporary directory, which becomes the section's model."""
    reject_foreign_builds()
    model, rollout = section.model, section.rollout
    if device == "auto":
        device = "cuda" if this_machine().gpus else "cpu"
    rollout.dtype, rollout.free_cache_engine = resolve_dtype(rollout.dtype, device), False
    rollout.enable_rollout_routing_replay = False
    work_in_private()  # the directory is removed when this process ends
    os.environ |= worker_environment(device, 1)  # before anything imports torch, as what follows does
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    entry = load(f"engine.{rollout.name}")
    os.environ |= entry.environment(rollout) | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}  # this process has threads
    model.path = whole_model(model.path, Path(tempfile.mkdtemp()), "model.path")
    return entry, device

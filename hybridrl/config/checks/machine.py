"""What this machine has, without torch: GPUs, cores, memory; and whether a run fits on it."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pynvml

from hybridrl.config.findings import Checker, ConfigError
from hybridrl.config.schema import SFTTrainerConfig

CPU_SLOT_BYTES = 3 << 29  # measured for the smallest models: a CPU device costs processes and memory, not cores
DEVICES = "trainer.n_gpus_per_node"


@dataclass(frozen=True)
class Machine:
    """`here`: the run would be on this machine, so that what is missing here is an error."""

    gpus: int
    cores: int
    memory_bytes: int
    here: bool = True


def this_machine(*, count_gpus: bool = True) -> Machine:
    """Count the devices of this machine. A broken CUDA driver raises ConfigError: it never silently means CPU."""
    return Machine(_gpus() if count_gpus else 0, len(os.sched_getaffinity(0)), psutil.virtual_memory().available)


def _gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return 0
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return 0
    except pynvml.NVMLError as error:
        raise ConfigError(
            f"there is an NVIDIA driver, but it is not responding ({error})",
            fix="fix the driver (nvidia-smi must work), or set trainer.device=cpu",
        ) from error
    try:
        count = pynvml.nvmlDeviceGetCount()
    finally:
        pynvml.nvmlShutdown()
    return count if visible is None else min(count, len(visible.split(",")))


def all_devices(trainer: SFTTrainerConfig) -> int:
    """The number of devices over all nodes."""
    return (trainer.n_gpus_per_node or 1) * trainer.nnodes


def resolve_devices(
    trainer: SFTTrainerConfig, ray_init: dict[str, Any], check: Checker, machine: Machine | None
) -> None:
    """Fill in `device` and `n_gpus_per_node`; check them, and the directories of the run, against the machine."""
    # A run on CPU does not need a working GPU driver.
    machine = machine or this_machine(count_gpus=trainer.device != "cpu")
    if trainer.device == "auto":
        trainer.device = "cuda" if machine.gpus else "cpu"
    if trainer.n_gpus_per_node is None:
        trainer.n_gpus_per_node = max(machine.gpus if trainer.device == "cuda" else min(machine.cores, 2), 1)
    if machine.here and not (os.environ.get("RAY_ADDRESS") or ray_init.get("address")):
        if trainer.device == "cuda" and machine.gpus == 0:
            check.error("trainer.device", "this machine has no usable GPU", "set trainer.device=cpu")
        elif trainer.device == "cuda" and trainer.n_gpus_per_node > machine.gpus:
            check.error(DEVICES, f"this machine has {machine.gpus} GPUs", f"set {DEVICES}={machine.gpus}")
        if trainer.nnodes > 1:
            check.error(
                "trainer.nnodes",
                "without a Ray cluster to join there is only this machine",
                "run ray start on each machine and set RAY_ADDRESS, or leave trainer.nnodes at 1",
            )
    if machine.here:
        for name in ("default_local_dir", "rollout_data_dir", "validation_data_dir"):
            if directory := vars(trainer).get(name):
                _check_writable(f"trainer.{name}", directory, check)
    most = max(machine.memory_bytes // CPU_SLOT_BYTES, 1)
    if trainer.device == "cpu" and trainer.n_gpus_per_node > most:
        check.error(DEVICES, f"free memory is enough for {most} CPU devices", f"set {DEVICES}={most}")


def _check_writable(key: str, directory: str, check: Checker) -> None:
    path = Path(directory).absolute()
    try:
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
    except OSError as error:
        return check.error(key, str(error.strerror), "name another directory")
    if not existing.is_dir():
        check.error(key, f"{existing} is a file", "name a directory")
    elif not os.access(existing, os.W_OK):
        check.error(key, f"{existing} is not writable", "name another directory")
    return None

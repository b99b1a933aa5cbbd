"""What this machine has, found without torch: GPUs, cores, memory."""

import os
from dataclasses import dataclass

import psutil
import pynvml

from hybridrl.config.error import ConfigError


@dataclass(frozen=True)
class Machine:
    """`here`: a run would be on this machine, so that what it lacks is lacking."""

    gpus: int
    cores: int
    memory_bytes: int
    here: bool = True


def this_machine(*, count_gpus: bool = True) -> Machine:
    """Count the devices of this machine. A CUDA driver that is there but broken raises: it never silently means CPU."""
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
            f"there is an NVIDIA driver, but it does not answer ({error}); mend it (nvidia-smi must work), "
            "or set trainer.device=cpu"
        ) from error
    try:
        count = pynvml.nvmlDeviceGetCount()
    finally:
        pynvml.nvmlShutdown()
    return count if visible is None else min(count, len(visible.split(",")))

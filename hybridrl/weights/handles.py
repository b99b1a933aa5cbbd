"""Memory that one process fills and another on the same device reads without a copy.

The handle is a CUDA IPC handle, or on CPU the file descriptor of an anonymous file in memory. Both are plain data that
needs no pickle, and both vanish with their processes: nothing stays behind in /dev/shm.
"""

import mmap
import os
from typing import Any

import torch

from hybridrl import device as devices

Handle = dict[str, Any]
# What torch.multiprocessing would pickle for a storage after its device, by name.
CUDA_STORAGE = ("memory", "storage_bytes", "offset", "counter", "counter_offset", "event", "synchronise")


class SharedBuffer:
    """A uint8 buffer on this process's device that other processes can open by `handle`."""

    def __init__(self, size: int, device: torch.device) -> None:
        if device.type == "cuda":
            self.tensor = torch.empty(size, dtype=torch.uint8, device=device)
            _, *shared = self.tensor.untyped_storage()._share_cuda_()
            self.handle: Handle = dict(zip(CUDA_STORAGE, shared, strict=True)) | {"size": size}
        else:
            descriptor = os.memfd_create("hybridrl-weights", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, size)
            self.tensor = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
            self.handle = {"pid": os.getpid(), "descriptor": descriptor, "size": size}

    def close(self, *, reader_died: bool = False) -> None:
        """Free the memory. On CUDA torch keeps it until its reader has closed it, which a dead reader cannot do."""
        if "descriptor" in self.handle:
            return os.close(self.handle["descriptor"])
        held = devices.allocated_bytes()
        del self.tensor
        if reader_died and devices.allocated_bytes() == held:  # closed a second time, it would be kept as well
            release = torch.UntypedStorage._release_ipc_counter_cuda
            release(self.handle["counter"], self.handle["counter_offset"])


def open_buffer(handle: Handle, device: torch.device) -> torch.Tensor:
    """Return the sender's memory as a uint8 tensor of this process; RuntimeError if it cannot be opened."""
    try:
        if device.type == "cuda":
            shared = (handle[name] for name in CUDA_STORAGE)
            storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *shared)
            return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (handle["size"],))
        descriptor = os.open(f"/proc/{handle['pid']}/fd/{handle['descriptor']}", os.O_RDWR)
        try:
            return torch.frombuffer(mmap.mmap(descriptor, handle["size"]), dtype=torch.uint8)
        finally:
            os.close(descriptor)
    except (OSError, ValueError, RuntimeError) as error:
        raise RuntimeError(
            f"the engine cannot open the trainer's memory ({error}): both must run on one machine and share its "
            "process and IPC namespaces; in a container add --ipc=host --pid=host, or start both in the same one"
        ) from error


def digest(buffer: torch.Tensor) -> int:
    """Return a checksum of a uint8 buffer whose size is a multiple of 8: the sum of its 64-bit words, modulo 2**64."""
    return int(buffer.view(torch.int64).sum())

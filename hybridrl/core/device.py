"""The differences between CPU and CUDA devices. The only module that uses `torch.cuda`."""

import ctypes
import mmap
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist

from hybridrl.required import required

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
RAY_MONITOR, RAY_THRESHOLD = "RAY_memory_monitor_refresh_ms", "RAY_memory_usage_threshold"  # 0: there is none
# File names of control groups, version 2 then 1: memory limit, memory use, CPU quota and period, memory use by kind.
MEMORY_FILES = "memory.max memory.limit_in_bytes", "memory.current memory.usage_in_bytes"
CGROUP_FILES = *MEMORY_FILES, "cpu.max cpu.cfs_quota_us cpu.cfs_period_us", "memory.stat"
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"  # a variable of the environment
ALL_ARENAS = b"arena.4096.purge"  # MALLCTL_ARENAS_ALL of jemalloc
ALIGNMENT = 64  # bytes, as in torch's own CPU allocator
KEPT_BYTES = 2**29  # unused bytes that an allocator on CPU may keep
CANCELLED, CANCEL_SECONDS = "cancelled", 1.0  # a key of a group's store, and how often it is looked for

T = TypeVar("T")


def compiled_architectures() -> list[str]:
    """Return the GPU architectures that torch has code for, such as sm_90; asks no driver, and creates no context."""
    return required(torch._C._cuda_getArchFlags()).split() if torch.version.cuda else []


def current(device: str) -> torch.device:
    """Return this process's device: workers see exactly one."""
    return torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")


def libraries() -> dict[str, str]:
    """Return the versions of CUDA and NCCL that torch was built with; empty for a CPU build."""
    if torch.version.cuda is None:
        return {}
    return {"CUDA": torch.version.cuda, "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}


@torch.compiler.assume_constant_result  # a compiled layer has the answer, not the question
def has_varlen_attention(device: torch.device) -> bool:
    """Return whether the device supports torch's variable-length attention: CUDA from Ampere on."""
    return device.type == "cuda" and _capability(device) >= (8, 0)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def listen(address: str) -> socket.socket:
    """Return a socket that listens at an address of this machine, on a free port."""
    return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


def open_store(address: str, listener: socket.socket | None, world_size: int | None, seconds: float) -> dist.TCPStore:
    """Return the store in which the ranks of a group meet; the first rank passes a socket that listens at the address.
    A socket created by torch would listen on every interface. Without `world_size` it does not wait for the others."""
    host, _, port = address.rpartition(":")
    options: dict[str, Any] = {} if listener is None else {"is_master": True, "master_listen_fd": listener.detach()}
    options |= {"timeout": timedelta(seconds=seconds), "wait_for_workers": world_size is not None}
    return dist.TCPStore(host, int(port), world_size, **options)


def join_group(
    device: str, address: str, listener: socket.socket | None, rank: int, world_size: int, timeout_seconds: float
) -> None:
    """Join the process group of all training ranks."""
    if device == "cuda":
        torch.cuda.set_device(0)
    store, timeout = open_store(address, listener, world_size, timeout_seconds), timedelta(seconds=timeout_seconds)
    dist.init_process_group(BACKENDS[device], store=store, rank=rank, world_size=world_size, timeout=timeout)


class BroadcastGroup:
    """A group of processes of several programs; the first process sends tensors to all others. Separate from the group
    of all training ranks. The first process passes a socket that listens at the address.

    NCCL does not notice the death of a process: the others wait until a process that knows of it calls
    `cancel_broadcasts`, and then fail within CANCEL_SECONDS. A group that has failed cannot be used again.
    """

    def __init__(
        self, device: str, address: str, listener: socket.socket | None, rank: int, size: int, seconds: float
    ) -> None:
        store = open_store(address, listener, None, seconds)
        self.signals = open_store(address, None, None, seconds)  # a connection is busy while something waits on it
        self.group: Any = None
        self.group = self._unless_cancelled(partial(_form_group, device, store, address, rank, size, seconds))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send a tensor from the first process to all others, which receive it in place; returns once the tensor may be
        changed or read. RuntimeError if a process has died."""
        self._unless_cancelled(lambda: self.group.broadcast(tensor, 0).wait())
        synchronize(tensor.device.type)

    def _unless_cancelled(self, call: Callable[[], T]) -> T:
        """Make a call in a thread and return its result: some waits of NCCL have no time limit."""
        result: Future[T] = Future()
        Thread(target=_resolve, args=(result, call), daemon=True).start()
        with ExitStack() as if_it_fails:
            if_it_fails.callback(self._abort)
            while wait([result], CANCEL_SECONDS).not_done:
                if self._cancelled():
                    raise RuntimeError("the broadcast was cancelled, as one of its processes has failed")
            returned = result.result()
            if_it_fails.pop_all()
            return returned

    def _abort(self) -> None:
        group, self.group = self.group, None  # on CPU the others, who may wait for this one, notice it
        with suppress(RuntimeError):  # gloo has no abort, and needs none
            if group is not None:
                group.abort()

    def _cancelled(self) -> bool:
        try:
            return self.signals.check([CANCELLED])
        except RuntimeError as error:
            raise RuntimeError("connection closed by the process that sends, which has died") from error


def _resolve(result: "Future[T]", call: Callable[[], T]) -> None:
    try:
        result.set_result(call())
    except BaseException as error:
        result.set_exception(error)


def _form_group(device: str, store: dist.TCPStore, address: str, rank: int, size: int, seconds: float) -> Any:
    if device == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=seconds)
        # Read by the constructor: a wait then lasts until the tensor has arrived, and raises. Otherwise it returns at
        # once, and a thread of torch's ends the process when the time limit is over.
        before = os.environ.get(BLOCKING_WAIT)
        os.environ[BLOCKING_WAIT] = "1"
        try:
            return dist.ProcessGroupNCCL(store, rank, size, options)
        finally:
            if before is None:
                del os.environ[BLOCKING_WAIT]
            else:
                os.environ[BLOCKING_WAIT] = before
    options = dist.ProcessGroupGloo._Options()  # pyrefly: ignore[missing-attribute]  # it is, in torch's C++
    options._timeout = timedelta(seconds=seconds)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(address))]
    return dist.ProcessGroupGloo(store, rank, size, options)


def cancel_broadcasts(address: str) -> None:
    """End all waits of the processes of the BroadcastGroup at an address; any process may call it."""
    host, _, port = address.rpartition(":")
    with suppress(OSError, RuntimeError):  # the first process has died, as the others notice
        socket.create_connection((host, int(port)), 10.0).close()  # torch would keep trying
        open_store(address, None, None, 10.0).set(CANCELLED, "")


def _own_address(address: str) -> str:
    """Return the address of this machine on the way to another one."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as way:  # sends nothing
        way.connect((host, int(port)))
        return str(way.getsockname()[0])


def own_group(group: dist.ProcessGroup | int | None) -> dist.ProcessGroup:
    """Return a new group that this rank is a member of: torch returns a number to other ranks."""
    assert isinstance(group, dist.ProcessGroup)
    return group


def collective_timeout() -> timedelta:
    """Return the time limit of collectives of all training ranks; torch gives further groups another one by default."""
    return required(dist.group.WORLD)._get_backend(torch.device("cpu")).options._timeout


def enable_determinism(device: str) -> None:
    """Use only deterministic kernels, and fail where there is none."""
    if device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    # Filling memory costs time, and uninitialised memory is never read here.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyrefly: ignore[missing-attribute]  # made at run time
    torch.use_deterministic_algorithms(True)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def release_cached_memory(device: str) -> None:
    """Free the allocator's unused blocks, which an engine on the same device cannot use; on CPU only if they are large,
    as the system clears a page before it is used again, which takes several times as long as writing it."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()  # first, as it frees blocks that another process has finished reading
        torch.cuda.empty_cache()
    else:
        release_host_memory(KEPT_BYTES)


def release_host_memory(least: int = 0, times_used: float = 0) -> None:
    """Give the pages that this process's allocator keeps without use back to the system, if they are known to be more
    than `least` bytes and this many times the bytes in use: of jemalloc, which workers preload, otherwise of glibc."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallctl"):
        library.mallctl(b"epoch", None, None, ctypes.byref(ctypes.c_uint64(1)), ctypes.c_size_t(8))  # update statistics
        used = _statistic(library, b"active")
        if _statistic(library, b"resident") - used > max(least, times_used * used):
            library.mallctl(ALL_ARENAS, None, None, None, ctypes.c_size_t(0))
    elif hasattr(library, "malloc_trim"):
        library.malloc_trim(ctypes.c_size_t(0))


def _statistic(jemalloc: ctypes.CDLL, name: bytes) -> int:
    value, size = ctypes.c_size_t(), ctypes.c_size_t(8)
    jemalloc.mallctl(b"stats." + name, ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return value.value


def allocated_bytes() -> int:
    """Return the bytes of this process's tensors on its CUDA device."""
    return torch.cuda.memory_allocated()


class _PageLocked(mmap.mmap):
    """Host memory that is registered with CUDA. It has its own pages, as registrations must not share a page, and is
    unregistered before these are freed: otherwise CUDA rejects whatever the system maps there next, and from then on
    every call of the process."""

    address: int | None = None

    def __del__(self) -> None:
        if self.address is not None:
            required(torch.cuda.cudart()).cudaHostUnregister(self.address)


def host_buffer(size: int, device: str) -> torch.Tensor:
    """Allocate this many bytes of host memory, uninitialised; page-locked on CUDA, for fast and asynchronous copies.
    Memory that torch page-locks itself is rounded up to a power of two per tensor: nearly twice as much for a 7B
    model."""
    if device != "cuda" or not size:
        return torch.empty(size, dtype=torch.uint8)
    pages = _PageLocked(-1, size)
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    torch.cuda.check_error(int(required(torch.cuda.cudart()).cudaHostRegister(buffer.data_ptr(), size, 0)))
    pages.address = buffer.data_ptr()
    return buffer


def room(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of a buffer that holds these tensors, each aligned."""
    return sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)


def carve(buffer: torch.Tensor, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors in the memory of a buffer of bytes, with the types and shapes of these tensors. Autograd does not
    take a change of one for a change of the others, as it would with views."""
    parts, begin = [], buffer.storage_offset()
    for tensor in tensors:
        part: Any = torch.empty(0, dtype=tensor.dtype, device=buffer.device)
        parts.append(part.set_(buffer.untyped_storage(), begin // tensor.itemsize, tensor.shape))
        begin += room([tensor])
    return parts


def memory_left() -> int:
    """Return the bytes that processes may still allocate here before the kernel or Ray's memory monitor kills one."""
    share = 1.0 if os.environ.get(RAY_MONITOR) == "0" else float(os.environ.get(RAY_THRESHOLD, 0.95))
    machine, (limit, _) = psutil.virtual_memory(), cgroup_limits(share=share)
    free = int(machine.available - (1 - share) * machine.total)
    return max(free if limit is None else min(free, limit), 0)


def store_bytes(ray_init: Mapping[str, Any], shared: int) -> int:
    """Return the size of Ray's object store: 30% of the memory, but at most `shared`, unless it is set."""
    return int(ray_init.get("object_store_memory") or min(0.3 * psutil.virtual_memory().total, shared))


def cgroup_limits(own: Path = OWN_CGROUP, mount: Path = CGROUPS, share: float = 1) -> tuple[int | None, float | None]:
    """Return the bytes that this process's control groups (of version 2 and 1) and their parents leave it, of a share
    of their limits, and its cores; None: no limit."""
    memory, cores = [], []
    for _, kinds, path in (line.split(":", 2) for line in own.read_text().splitlines()) if own.is_file() else ():
        group = Path(path.strip("/"))  # in a container it may not be below the mount, which is its own group
        tops = (mount / kinds, *(mount / kind for kind in kinds.split(","))) if kinds else (mount, mount / "unified")
        for directory in (top / part for top in tops for part in (group, *group.parents)):
            most, used, quota, stat = (_words(directory, *names.split()) for names in CGROUP_FILES)
            if most and used and most[0] != "max" and int(most[0]) < 1 << 60:  # version 1: above this, no limit
                sizes = dict(zip(stat[::2], map(int, stat[1::2]), strict=True))
                # Counted as used, but reclaimable. In version 1 "total_" includes the groups below, as the rest does.
                cached = (sizes.get(f"total_{kind}", sizes.get(kind, 0)) for kind in ("active_file", "inactive_file"))
                memory.append(int(share * int(most[0])) - int(used[0]) + sum(cached))
            if quota and quota[0] not in ("max", "-1"):
                cores.append(int(quota[0]) / int(quota[1]))
    return min(memory, default=None), min(cores, default=None)


def _words(directory: Path, *names: str) -> list[str]:
    """Return the words of the files that exist among `names`."""
    return [word for name in names if (directory / name).is_file() for word in (directory / name).read_text().split()]


def memory(device: str) -> dict[str, float]:
    """Return the memory used by this process, and on CUDA by its device, and the free memory, in GiB."""
    used = {
        "cpu_memory_used_gb": psutil.Process().memory_info().rss / 2**30,
        "host_memory_free_gb": memory_left() / 2**30,
    }
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        used["max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
        used["max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / 2**30
        used["device_used_gb"], used["device_free_gb"] = (total - free) / 2**30, free / 2**30
    return used

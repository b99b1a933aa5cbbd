"""The few facts in which a CPU and a CUDA device differ. The only module that names `torch.cuda`."""

import os
import socket
from datetime import timedelta
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir

import psutil
import torch
import torch.distributed as dist

ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def environment(device: str, slots: int) -> dict[str, str]:
    """Variables that must stand before torch is imported in a worker process; `slots` share the machine's cores."""
    cores = max(len(os.sched_getaffinity(0)) // slots, 1)
    threads = str(cores if device == "cpu" else min(cores, 8))
    common = {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if device == "cuda":
        # By default it would lie among the temporary files, which end with the run, and be compiled again in the next.
        compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{gettempdir()}/torchinductor_{os.getuid()}")
        more = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "TORCHINDUCTOR_CACHE_DIR": compiled}
        return common | more | without_expandable_segments()
    # On CPU the few functions that vLLM compiles take seconds of g++ and save nothing. Threads that wait for one
    # another spin for some microseconds: without it an update takes 1.16 times as long on two cores, and with OpenMP's
    # own millisecond of it 1.35 times as long where another program wants a core (scripts/benchmark/threads.py).
    return common | {"TORCH_COMPILE_DISABLE": "1", "MKL_NUM_THREADS": threads, "GOMP_SPINCOUNT": "5000"} | _allocator()


def without_expandable_segments() -> dict[str, str]:
    """The settings of torch's CUDA allocator that ask for expandable segments, without these: other processes can open
    memory in such segments by a file descriptor of the sender only, which containers refuse."""
    set_ = {name: os.environ[name] for name in ALLOCATOR_SETTINGS if "expandable_segments" in os.environ.get(name, "")}
    return {
        name: ",".join(item for item in value.split(",") if not item.strip().startswith("expandable_segments"))
        for name, value in set_.items()
    }


def _allocator() -> dict[str, str]:
    """jemalloc, which Ray brings along, unless another allocator is preloaded already.

    glibc gives blocks above 32 MiB back at once, and the system clears every page that it hands out anew: to write such
    a tensor takes five times as long as in memory that was kept, and to hand weights over twice as long.
    """
    preloaded, package = os.environ.get("LD_PRELOAD", ""), find_spec("ray")
    library = Path(package.origin).parent / "core" / "libjemalloc.so" if package and package.origin else None
    if "malloc" in preloaded or library is None or not library.exists() or set(" :") & set(str(library)):
        return {}  # a name with a space or colon would be taken for two
    # What is freed is kept, large blocks too, for as long as the process lives. jemalloc heeds what it reads last.
    options = ["oversize_threshold:0", "dirty_decay_ms:-1", *filter(None, [os.environ.get("MALLOC_CONF")])]
    return {"LD_PRELOAD": f"{library} {preloaded}".strip(), "MALLOC_CONF": ",".join(options)}


def current(device: str) -> torch.device:
    """This process's device: workers see exactly one."""
    return torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")


@cache
def has_varlen_attention(device: torch.device) -> bool:
    """Whether torch's attention for rows of different lengths runs there: on CUDA from Ampere on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def listen(address: str) -> socket.socket:
    """A socket that listens at an address of this machine, on a free port."""
    return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


def open_store(address: str, listener: socket.socket | None, world_size: int, seconds: float) -> dist.TCPStore:
    """What the ranks of a group meet in; the first one has a socket that listens at the address. With one that torch
    makes by itself it would listen on every interface."""
    host, _, port = address.rpartition(":")
    held = {} if listener is None else {"is_master": True, "master_listen_fd": listener.detach()}
    return dist.TCPStore(host, int(port), world_size, timeout=timedelta(seconds=seconds), **held)


def join_group(
    device: str, address: str, listener: socket.socket | None, rank: int, world_size: int, timeout_seconds: float
) -> None:
    """Enter the process group of all training ranks."""
    if device == "cuda":
        torch.cuda.set_device(0)
    store, timeout = open_store(address, listener, world_size, timeout_seconds), timedelta(seconds=timeout_seconds)
    dist.init_process_group(BACKENDS[device], store=store, rank=rank, world_size=world_size, timeout=timeout)


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)


def be_deterministic(device: str) -> None:
    """Use kernels that give the same bits every time, and fail where there is none."""
    if device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs time; nothing here reads what nobody wrote
    torch.use_deterministic_algorithms(True)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def release_cached_memory(device: str) -> None:
    """Give the allocator's unused blocks back: an engine on the same GPU cannot see them."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()  # before: it frees blocks that another process has read to the end
        torch.cuda.empty_cache()


def allocated_bytes() -> int:
    """Of this process's tensors on its CUDA device."""
    return torch.cuda.memory_allocated()


def host_buffer(size: int, device: str) -> torch.Tensor:
    """Host memory of so many bytes, uninitialised; page-locked on CUDA, which copies need to be fast and asynchronous.

    Memory that torch page-locks itself is rounded up to a power of two, for each tensor: nearly twice as much for a
    model of 7 B.
    """
    buffer = torch.empty(size, dtype=torch.uint8)
    if device == "cuda" and size:
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size, 0)))
    return buffer


def memory(device: str) -> dict[str, float]:
    """Memory of this process, and on CUDA of its device, in GiB."""
    used = {"cpu_memory_used_gb": psutil.Process().memory_info().rss / 2**30}
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        used["max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
        used["max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / 2**30
        used["device_used_gb"] = (total - free) / 2**30
    return used

"""The environment of worker processes, which libraries read when they are loaded; imports none of them."""

import os
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir
from typing import Any

ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def joins(ray_init: dict[str, Any]) -> bool:
    """Whether a run joins an existing Ray instead of starting its own."""
    return bool(os.environ.get("RAY_ADDRESS") or ray_init.get("address"))


def worker_environment(device: str, slots: int) -> dict[str, str]:
    """Return the variables to set before torch is imported in a worker process; `slots` ranks share the CPU cores."""
    cores = max(len(os.sched_getaffinity(0)) // slots, 1)
    threads = str(cores if device == "cpu" else min(cores, 8))
    common = {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if device == "cuda":
        # By default this cache is in the run's temporary directory, and the next run would compile everything again.
        compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{gettempdir()}/torchinductor_{os.getuid()}")
        more = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "TORCHINDUCTOR_CACHE_DIR": compiled}
        return common | more | without_expandable_segments()
    # On CPU the few functions that vLLM compiles take seconds of g++ and save nothing. Threads that wait for each other
    # spin for some microseconds: without spinning an update takes 1.16 times as long on two cores, and with OpenMP's
    # default of a millisecond 1.35 times as long if another program needs a core (scripts/benchmark/threads.py).
    return common | {"TORCH_COMPILE_DISABLE": "1", "MKL_NUM_THREADS": threads, "GOMP_SPINCOUNT": "5000"} | _allocator()


def without_expandable_segments() -> dict[str, str]:
    """Return torch's CUDA allocator settings without expandable segments, if they are requested: other processes can
    open such memory only through a file descriptor of the sender, which containers do not allow."""
    settings = {
        name: os.environ[name] for name in ALLOCATOR_SETTINGS if "expandable_segments" in os.environ.get(name, "")
    }
    return {
        name: ",".join(item for item in value.split(",") if not item.strip().startswith("expandable_segments"))
        for name, value in settings.items()
    }


def _allocator() -> dict[str, str]:
    """Return the variables that preload jemalloc, which comes with Ray, unless another allocator is preloaded already.
    glibc frees blocks above 32 MiB at once, and the system clears every page before it is used again: writing such a
    tensor takes five times as long as in memory that was kept, and a weight sync twice as long."""
    preloaded, package = os.environ.get("LD_PRELOAD", ""), find_spec("ray")
    library = Path(package.origin).parent / "core" / "libjemalloc.so" if package and package.origin else None
    if "malloc" in preloaded or library is None or not library.exists() or set(" :") & set(str(library)):
        return {}  # a path with a space or colon would be split
    # Freed memory is kept, also large blocks, for the lifetime of the process. jemalloc uses the last value of a key.
    options = ["oversize_threshold:0", "dirty_decay_ms:-1", *filter(None, [os.environ.get("MALLOC_CONF")])]
    return {"LD_PRELOAD": f"{library} {preloaded}".strip(), "MALLOC_CONF": ",".join(options)}

"""The waiting of a parallel operation's threads for each other on a CPU: they spin, and sleep early while others use
the cores.

Spinning saves waking a thread for each of the many small products of a token. Next to a busy program it takes the core
from the very thread that is waited for: small products then take 2.7 times as long as without spinning
(scripts/benchmark/threads.py).

libgomp reads the length of the wait when it is loaded and has no function to change it, but two lengths:
`GOMP_SPINCOUNT`, and a hundred spins (`OMP_WAIT_POLICY=PASSIVE`) as long as its pools have more threads than there are
cores. So while others use the cores, a second pool is kept, whose threads sleep. Only the waiting depends on the load:
the number of threads that compute, and with it the rounding of every sum, is fixed.
"""

import os
import threading
import time
from collections.abc import Callable

import psutil
import torch

INTERVAL = 0.1  # seconds between two looks at the load: workers take turns within a step
SHARE = 0.3  # of a core: others that use more than what this process leaves free, plus this, are in the way
PARALLEL = 1 << 16  # elements of a sum that torch divides among its threads

Load = tuple[float, float, float]  # a time, and the seconds that all cores and this process have worked by then
_watch: threading.Thread | None = None


def give_way() -> None:
    """Start to keep this process's threads sleeping early while others use the cores; once per process is enough."""
    global _watch
    if _watch is None and torch.get_num_threads() > 1:
        _watch = threading.Thread(target=watch_load, name="load", daemon=True)
        _watch.start()


def second_pool() -> Callable[[], None]:
    """Create a pool of OpenMP threads that does nothing, which libgomp counts; return what ends it."""
    ended = threading.Event()

    def hold() -> None:
        torch.zeros(PARALLEL).add_(1.0)  # creates the pool, which ends with this thread
        ended.wait()

    threading.Thread(target=hold, name="second pool", daemon=True).start()
    return ended.set


def watch_load() -> None:
    """Keep a second pool while others are in the way; does not return."""
    cores, close = sorted(os.sched_getaffinity(0)), None
    free = len(cores) - torch.get_num_threads()
    before = used(cores)
    while True:
        time.sleep(INTERVAL)
        now = used(cores)
        crowded, before = is_crowded(before, now, free), now
        if crowded and close is None:
            close = second_pool()
        elif not crowded and close is not None:
            close = close()


def is_crowded(before: Load, now: Load, free: int) -> bool:
    """Return whether others used more than what this process leaves free: `free` cores, and a share of one."""
    seconds, machine, own = (later - earlier for earlier, later in zip(before, now, strict=True))
    return machine - own > (free + SHARE) * seconds


def used(cores: list[int]) -> Load:
    """Return the time, the seconds that these cores have worked since the start of the machine, and this process's."""
    every = psutil.cpu_times(percpu=True)
    times = [every[core] for core in cores if core < len(every)]
    return (
        time.monotonic(),
        sum(sum(core) - core.idle - getattr(core, "iowait", 0.0) for core in times),
        time.process_time(),
    )

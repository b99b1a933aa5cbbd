"""Spinning of OpenMP threads on a CPU: the threads of a parallel operation wait for each other by spinning, and sleep
early while other processes use the cores.

Spinning saves waking a thread for each of the many small products of a token. Next to a busy program it takes the core
from the very thread that the others wait for: small products then take 2.7 times as long as without spinning
(scripts/benchmark/threads.py).

libgomp reads the length of the wait when it is loaded and has no function to change it. But it has two lengths:
`GOMP_SPINCOUNT`, and a hundred spins (`OMP_WAIT_POLICY=PASSIVE`) as long as its pools have more threads than there are
cores. So a second pool with sleeping threads is kept while other processes use the cores. Only the waiting depends on
the load: the number of computing threads, and with it the rounding of every sum, is fixed.
"""

import os
import threading
import time
from collections.abc import Callable

import psutil
import torch

INTERVAL = 0.1  # seconds between two looks at the load: workers take turns within a step
SHARE = 0.3  # share of a core that other processes may use beyond the free cores before they count as in the way
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
    """Create an idle pool of OpenMP threads, which libgomp counts; return a function that ends it."""
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
    """Return whether other processes used more than the `free` cores of this one, plus SHARE of a core."""
    seconds, machine, own = (later - earlier for earlier, later in zip(before, now, strict=True))
    return machine - own > (free + SHARE) * seconds


def used(cores: list[int]) -> Load:
    """Return the time, the busy seconds of these cores since the machine started, and those of this process."""
    every = psutil.cpu_times(percpu=True)
    times = [every[core] for core in cores if core < len(every)]
    return (
        time.monotonic(),
        sum(sum(core) - core.idle - getattr(core, "iowait", 0.0) for core in times),
        time.process_time(),
    )

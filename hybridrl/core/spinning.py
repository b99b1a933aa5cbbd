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

import psutil
import torch

INTERVAL = 0.1  # seconds between two looks at the load: workers take turns within a step
SHARE = 0.3  # of a core: others that use more than what this process leaves free, plus this, are in the way
PARALLEL = 1 << 16  # elements of a sum that torch divides among its threads

_watch: threading.Thread | None = None


def give_way() -> None:
    """From now on let this process's threads sleep early while others use the cores; once per process is enough."""
    global _watch
    if _watch is None and torch.get_num_threads() > 1:
        _watch = threading.Thread(target=watch_load, name="load", daemon=True)
        _watch.start()


class SecondPool:
    """A pool of OpenMP threads that does nothing; libgomp counts its threads."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._hold, name="second pool", daemon=True)
        self.thread.start()

    def _hold(self) -> None:
        torch.zeros(PARALLEL).add_(1.0)  # makes the pool, which ends with this thread
        self.ended.wait()

    def close(self) -> None:
        self.ended.set()
        self.thread.join()


def watch_load() -> None:
    """Keep a second pool while others are in the way; does not return."""
    cores, pool = sorted(os.sched_getaffinity(0)), None
    free = len(cores) - torch.get_num_threads()
    before = used(cores)
    while True:
        time.sleep(INTERVAL)
        now = used(cores)
        seconds, others = now[0] - before[0], (now[1] - before[1]) - (now[2] - before[2])
        before = now
        crowded = others > (free + SHARE) * seconds
        if crowded and pool is None:
            pool = SecondPool()
        elif not crowded and pool is not None:
            pool = pool.close()


def used(cores: list[int]) -> tuple[float, float, float]:
    """Return the time, the seconds that these cores have worked since the start of the machine, and this process's."""
    every = psutil.cpu_times(percpu=True)
    times = [every[core] for core in cores if core < len(every)]
    return (
        time.monotonic(),
        sum(sum(one) - one.idle - getattr(one, "iowait", 0.0) for one in times),
        time.process_time(),
    )

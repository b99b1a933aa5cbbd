"""Threads that wait for each other sleep early while others use the cores; what they compute is the same."""

import os
import subprocess
import sys

import pytest

from hybridrl.core import spinning
from hybridrl.runtime.environment import worker_environment

POOLS = """
import os, torch
from hybridrl.core.spinning import SecondPool
def threads(): return len(os.listdir("/proc/self/task"))
torch.manual_seed(0)
rows, weights = torch.randn(257, 384), torch.randn(384, 1280)
def work(): return torch.nn.functional.silu(rows @ weights), rows.sum(), rows.repeat(40, 1).sum(0)
alone, before = work(), threads()
pool = SecondPool()
while threads() < before + 2: pass
next_to_a_pool = work()
pool.close()
while threads() > before: pass
print(all(map(torch.equal, alone, next_to_a_pool)), torch.get_num_threads())
"""


def test_a_second_pool_has_threads_of_its_own_which_end_with_it_and_changes_no_digit():
    variables = os.environ | worker_environment("cpu", 1) | {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", POOLS], env=variables, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True", "2"], done.stderr


class Stopped(Exception):
    """The end of the readings."""


@pytest.mark.parametrize(
    ("threads", "others", "pools"),
    [
        # Seconds of processor time that others use in each half second, on four cores.
        (4, [0.0, 0.1, 0.2, 0.0], ["one", "closed"]),  # more than 0.3 of a core only in the third
        (4, [0.0, 0.1, 0.1], []),
        (2, [0.9, 1.1, 0.9], []),  # two cores are free: 1 s per half second
        (2, [0.9, 1.2, 1.2, 0.2], ["one", "closed"]),
    ],
)
def test_threads_give_way_while_others_use_more_than_is_free(monkeypatch, threads, others, pools):
    """The process itself uses all its threads all the time."""
    done, readings = [], [(0.0, 0.0, 0.0)]
    for used in others:
        time, machine, own = readings[-1]
        readings.append((time + 0.5, machine + threads * 0.5 + used, own + threads * 0.5))

    class Pool:
        def __init__(self):
            done.append("one")

        def close(self):
            done.append("closed")

    left = iter(readings)

    def read(cores):
        for reading in left:
            return reading
        raise Stopped

    monkeypatch.setattr(spinning, "SecondPool", Pool)
    monkeypatch.setattr(spinning, "used", read)
    monkeypatch.setattr(spinning.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(spinning.os, "sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.setattr(spinning.torch, "get_num_threads", lambda: threads)
    with pytest.raises(Stopped):
        spinning.watch_load()
    assert done == pools


def test_the_load_of_a_machine_contains_this_process_s():
    cores = sorted(os.sched_getaffinity(0))
    time, machine, own = spinning.used(cores)
    sum(number * number for number in range(3_000_000))
    later = spinning.used(cores)
    assert later[0] > time
    assert later[2] - own > 0.05
    assert later[1] - machine >= later[2] - own - 0.05  # the system counts in hundredths of a second

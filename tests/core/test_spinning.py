"""Threads that wait for each other sleep early while others use the cores; what they compute is the same."""

import os
import subprocess
import sys

import pytest

from hybridrl.core.spinning import is_crowded, used
from hybridrl.runtime.environment import worker_environment

POOLS = """
import os, torch
from hybridrl.core.spinning import second_pool
def threads(): return len(os.listdir("/proc/self/task"))
torch.manual_seed(0)
rows, weights = torch.randn(257, 384), torch.randn(384, 1280)
def work(): return torch.nn.functional.silu(rows @ weights), rows.sum(), rows.repeat(40, 1).sum(0)
alone, before = work(), threads()
close = second_pool()
while threads() < before + 2: pass
next_to_a_pool = work()
close()
while threads() > before: pass
print(all(map(torch.equal, alone, next_to_a_pool)), torch.get_num_threads())
"""


def test_a_second_pool_has_threads_of_its_own_which_end_with_it_and_changes_no_digit():
    variables = os.environ | worker_environment("cpu", 1) | {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", POOLS], env=variables, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True", "2"], done.stderr


@pytest.mark.parametrize(
    ("free", "others", "crowded"),
    [(0, 0.1, False), (0, 0.2, True), (2, 1.1, False), (2, 1.2, True)],  # 0.3 of a core more than what is free
)
def test_threads_give_way_while_others_use_more_than_is_free(free, others, crowded):
    """In half a second, in which the process itself uses all of its threads."""
    own = 0.5 * (4 - free)
    assert is_crowded((1.0, 7.0, 3.0), (1.5, 7.0 + own + others, 3.0 + own), free) is crowded


def test_the_load_of_a_machine_contains_this_process_s():
    cores = sorted(os.sched_getaffinity(0))
    time, machine, own = used(cores)
    sum(number * number for number in range(3_000_000))
    later = used(cores)
    assert later[0] > time
    assert later[2] - own > 0.05
    assert later[1] - machine >= later[2] - own - 0.05  # the system counts in hundredths of a second

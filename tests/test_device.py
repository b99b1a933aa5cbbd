"""The environment that workers and engines are started with."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hybridrl import device as devices

FAULTS = """
import resource, torch
torch.set_num_threads(1)
def write():
    torch.empty(64 << 20, dtype=torch.uint8).fill_(1)
write(), write()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
write()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_on_cpu_a_large_tensors_memory_is_written_again_without_asking_the_system() -> None:
    """64 MiB are 16,384 pages, each a fault where the system hands it out anew."""
    environment = os.environ | devices.environment("cpu", slots=1)
    found = subprocess.run([sys.executable, "-c", FAULTS], env=environment, capture_output=True, text=True, check=True)
    assert int(found.stdout) < 1000


def test_an_allocator_that_is_preloaded_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libtcmalloc_minimal.so.4")
    assert "LD_PRELOAD" not in devices.environment("cpu", slots=1)


def test_what_else_is_preloaded_stays_beside_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libgomp.so.1")
    assert devices.environment("cpu", slots=1)["LD_PRELOAD"].split()[1:] == ["/usr/lib/libgomp.so.1"]


def test_ones_own_options_of_the_allocator_come_last_and_so_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_CONF", "dirty_decay_ms:500")
    assert devices.environment("cpu", slots=1)["MALLOC_CONF"].endswith(",dirty_decay_ms:500")


@pytest.mark.parametrize("place", ["a place", "a:place"])
def test_an_allocator_whose_path_would_be_taken_for_two_is_left_out(tmp_path, monkeypatch, place) -> None:
    library = tmp_path / place / "core" / "libjemalloc.so"
    library.parent.mkdir(parents=True)
    library.touch()
    found = SimpleNamespace(origin=str(tmp_path / place / "__init__.py"))
    monkeypatch.setattr(devices, "find_spec", lambda _: found)
    assert "LD_PRELOAD" not in devices.environment("cpu", slots=1)


def test_on_cuda_the_allocator_is_the_systems() -> None:
    assert "LD_PRELOAD" not in devices.environment("cuda", slots=1)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_on_cuda_segments_that_other_processes_cannot_open_are_not_used(monkeypatch: pytest.MonkeyPatch, name) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
    assert devices.environment("cuda", slots=1)[name] == "max_split_size_mb:64"
    assert name not in devices.environment("cpu", slots=1)
    monkeypatch.setenv(name, "max_split_size_mb:64")
    assert name not in devices.environment("cuda", slots=1)


def test_slots_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert devices.environment("cpu", slots=2)["OMP_NUM_THREADS"] == "4"
    assert devices.environment("cpu", slots=16)["OMP_NUM_THREADS"] == "1"

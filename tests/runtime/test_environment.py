"""The environment in which workers and engines are started."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hybridrl.rollout.vllm.settings import ENVIRONMENT
from hybridrl.runtime import environment as environments
from hybridrl.runtime.environment import worker_environment

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


def test_on_cpu_the_memory_of_a_large_tensor_is_reused_without_page_faults() -> None:
    """64 MiB are 16,384 pages, each a fault when the system has to provide it again."""
    environment = os.environ | worker_environment("cpu", slots=1)
    result = subprocess.run([sys.executable, "-c", FAULTS], env=environment, capture_output=True, text=True, check=True)
    assert int(result.stdout) < 1000


def test_a_preloaded_allocator_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libtcmalloc_minimal.so.4")
    assert "LD_PRELOAD" not in worker_environment("cpu", slots=1)


def test_other_preloaded_libraries_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libgomp.so.1")
    assert worker_environment("cpu", slots=1)["LD_PRELOAD"].split()[1:] == ["/usr/lib/libgomp.so.1"]


def test_custom_allocator_options_come_last_and_take_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_CONF", "dirty_decay_ms:500")
    assert worker_environment("cpu", slots=1)["MALLOC_CONF"].endswith(",dirty_decay_ms:500")


@pytest.mark.parametrize("place", ["a place", "a:place"])
def test_an_allocator_whose_path_would_be_split_is_not_used(tmp_path, monkeypatch, place) -> None:
    library = tmp_path / place / "core" / "libjemalloc.so"
    library.parent.mkdir(parents=True)
    library.touch()
    result = SimpleNamespace(origin=str(tmp_path / place / "__init__.py"))
    monkeypatch.setattr(environments, "find_spec", lambda _: result)
    assert "LD_PRELOAD" not in worker_environment("cpu", slots=1)


def test_on_cuda_the_system_allocator_is_used() -> None:
    assert "LD_PRELOAD" not in worker_environment("cuda", slots=1)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_on_cuda_segments_that_other_processes_cannot_open_are_not_used(monkeypatch: pytest.MonkeyPatch, name) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
    assert worker_environment("cuda", slots=1)[name] == "max_split_size_mb:64"
    assert name not in worker_environment("cpu", slots=1)
    monkeypatch.setenv(name, "max_split_size_mb:64")
    assert name not in worker_environment("cuda", slots=1)


def test_slots_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert worker_environment("cpu", slots=2)["OMP_NUM_THREADS"] == "4"
    assert worker_environment("cpu", slots=16)["OMP_NUM_THREADS"] == "1"


def test_an_engine_waits_for_its_threads_longer_than_a_trainer() -> None:
    assert int(ENVIRONMENT["GOMP_SPINCOUNT"]) > int(worker_environment("cpu", slots=2)["GOMP_SPINCOUNT"])

"""Ports of process groups, and memory of the host."""

import ctypes
import mmap
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from hybridrl.core import device as devices
from hybridrl.runtime.environment import worker_environment


def test_ports_are_chosen_by_the_system_and_held_until_a_group_has_them():
    first, second = devices.listen("127.0.0.1"), devices.listen("127.0.0.1")
    ports = [one.getsockname()[1] for one in (first, second)]
    with first, second, pytest.raises(OSError, match="in use"):
        assert ports[0] != ports[1]
        socket.create_server(("127.0.0.1", ports[0])).close()


class Runtime:
    """CUDA's registration of host memory: it fails for memory that is registered, and reads what it gives back."""

    def __init__(self):
        self.registered = {}

    def cudaHostRegister(self, address, size, flags):
        assert not any(start < address + size and address < start + n for start, n in self.registered.items())
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address):
        ctypes.string_at(address, self.registered.pop(address))  # a crash if it was freed before
        return 0


def test_page_locked_memory_has_pages_of_its_own_and_is_given_back_before_it_is_freed(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(cudart=lambda: runtime, check_error=lambda code: None))
    for _ in range(20):
        buffers = [devices.host_buffer(size, "cuda") for size in (1, 1000, 5000, 70_000, 4 << 20)]
        assert all(buffer.data_ptr() % mmap.PAGESIZE == 0 for buffer in buffers)
        assert sorted(runtime.registered.values()) == [len(buffer) for buffer in buffers]
        kept = buffers[3].view(torch.float32)[10:]  # a view keeps the memory
        del buffers
        assert list(runtime.registered.values()) == [70_000]
        kept[:] = 1.0
        del kept
        assert not runtime.registered


@pytest.mark.parametrize("allocator", ["jemalloc", "glibc"])
def test_pages_without_use_are_given_back_and_few_are_kept_where_that_costs_time(allocator):
    environment = {"LD_PRELOAD": "", **(worker_environment("cpu", 1) if allocator == "jemalloc" else {})}
    assert allocator in environment["LD_PRELOAD"] or allocator == "glibc"
    command = [sys.executable, "-m", "tests.core.kept_memory"]
    output = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, check=True).stdout
    used, cached, released = map(int, output.split())
    if allocator == "jemalloc":  # which says how much it keeps: here less than KEPT_BYTES
        assert cached > used - 20
    assert released < used - 150

"""Ports of process groups."""

import ctypes
import mmap
import socket
from types import SimpleNamespace

import pytest
import torch

from hybridrl.core import device as devices


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

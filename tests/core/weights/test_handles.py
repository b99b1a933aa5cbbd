import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from hybridrl.core.weights.buckets import (
    BucketReader,
    SharedBuffer,
    bucket_description,
    digest,
    open_buffer,
    plan_buckets,
)
from hybridrl.required import required

CPU = torch.device("cpu")
SIZE = 4096
READER = """
import json, sys
import torch
from hybridrl.core.weights.buckets import digest, open_buffer

buffer = open_buffer(json.loads(sys.stdin.readline()), torch.device("cpu"))
for _ in sys.stdin:
    print(json.dumps([digest(buffer), buffer[:3].tolist(), buffer.numel()]), flush=True)
"""


@pytest.fixture
def buffer() -> Iterator[SharedBuffer]:
    shared = SharedBuffer(SIZE, CPU)
    yield shared
    shared.close()


def test_another_process_reads_what_this_one_writes_now_and_later(buffer):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", READER], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as reader:
        print(json.dumps(buffer.handle), file=reader.stdin, flush=True)
        for seed in range(2):
            buffer.tensor.copy_(torch.randint(256, (SIZE,), generator=torch.Generator().manual_seed(seed)))
            print("what is there?", file=reader.stdin, flush=True)
            read = json.loads(required(reader.stdout).readline())
            assert read == [digest(buffer.tensor), buffer.tensor[:3].tolist(), SIZE]
        required(reader.stdin).close()


def test_a_new_buffer_is_empty_and_is_opened_by_plain_data(buffer):
    opened = open_buffer(json.loads(json.dumps(buffer.handle)), CPU)
    assert not opened.any()
    buffer.tensor[7] = 9
    assert opened[7] == 9


def test_a_reader_gets_the_tensors_of_each_bucket_where_the_bytes_are_those_that_were_sent(buffer):
    sent = {f"model.layers.{layer}.w": torch.arange(12.0).view(3, 4) + layer for layer in range(3)}
    buckets = plan_buckets([(name, value.shape, value.dtype) for name, value in sent.items()], 128)
    reader, starts = BucketReader(CPU), [bucket.start for bucket in buckets]
    assert len(buckets) == 3 and len(set(starts)) == 2
    for bucket in buckets:
        for tensor in bucket.tensors:
            tensor.view(bucket.view(buffer.tensor)).copy_(sent[tensor.name])
        info = json.loads(json.dumps(bucket_description(bucket, [buffer.handle], [digest(bucket.view(buffer.tensor))])))
        for name, value in reader.read(0, info):
            torch.testing.assert_close(value, sent.pop(name), rtol=0, atol=0)
        buffer.tensor[bucket.start] += 1
        with pytest.raises(RuntimeError, match="not those that were sent"):
            reader.read(0, info)
    assert not sent


def test_the_memory_is_in_no_directory_so_nothing_is_left_behind(buffer):
    assert os.fstat(buffer.handle["descriptor"]).st_nlink == 0


@pytest.mark.parametrize(("freed", "expected"), [(False, [("file", 3)]), (True, [])])
def test_memory_held_by_a_dead_reader_is_released_once(monkeypatch, freed, expected):
    """A stand-in for CUDA: whether the memory is freed with the sender's tensor, and which counter is released then."""
    released, memory = [], iter([SIZE, 0 if freed else SIZE])
    monkeypatch.setattr("hybridrl.core.device.allocated_bytes", lambda: next(memory))
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", lambda *counter: released.append(counter))
    shared = SharedBuffer.__new__(SharedBuffer)
    shared.descriptor, shared.tensor = None, torch.empty(SIZE)
    shared.handle = {"counter": "file", "counter_offset": 3}
    shared.close(reader_died=True)
    assert released == expected


def closed_descriptor(buffer):
    other = SharedBuffer(SIZE, CPU)
    other.close()
    return other.handle


def ended_process(buffer):
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    return buffer.handle | {"pid": child.pid}


def too_short_a_file(buffer):
    return buffer.handle | {"size": 2 * SIZE}


@pytest.mark.parametrize("broken", [closed_descriptor, ended_process, too_short_a_file])
def test_memory_that_cannot_be_opened_is_an_error_that_names_the_fix(buffer, broken):
    with pytest.raises(RuntimeError, match=r"cannot open the trainer's memory \(.+\).*--ipc=host --pid=host"):
        open_buffer(broken(buffer), CPU)


def test_the_digest_is_the_sum_of_the_words_and_wraps_around():
    assert digest(torch.tensor([1, 2, 40], dtype=torch.int64).view(torch.uint8)) == 43
    assert digest(torch.tensor([2**63 - 1, 1], dtype=torch.int64).view(torch.uint8)) == -(2**63)


def test_the_digest_changes_with_a_single_byte():
    memory = torch.zeros(64, dtype=torch.uint8)
    before = digest(memory)
    memory[37] = 1
    assert digest(memory) != before

"""How long a merge takes beside copying the same bytes: `python scripts/benchmark/merge.py [--directory DIR]`

A random model of Qwen2.5-0.5B's shapes, in float32 and with AdamW's moments, is saved as shards of two ranks. Timed are
the writing of the merged directory without its checks, the checks, and a plain copy of as many bytes on the same disk,
each to the last byte on the disk; the files that are read lie in memory for all of them, as after a save.
"""

import argparse
import multiprocessing
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from hybridrl.checkpoint.disk import reach_disk
from hybridrl.model_merger.checks import check_tensors
from hybridrl.model_merger.merge import byte_count, write_model
from hybridrl.model_merger.source import open_source

RANKS, ROUNDS, CHUNK = 2, 5, 16 << 20
CONFIG = Qwen2Config(
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    architectures=["Qwen2ForCausalLM"],
    dtype="float32",
)


def save(rank: int, directory: Path) -> None:
    """One rank's part of a saved step, as a run writes it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(directory / "store"), RANKS), rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in AutoModelForCausalLM.from_config(CONFIG).named_parameters()}
    tensors = {name: distribute_tensor(torch.randn(shape), mesh, [Shard(0)]) for name, shape in shapes.items()}
    moments = {name: {"exp_avg": tensor, "exp_avg_sq": tensor} for name, tensor in tensors.items()}
    dcp.save({"model": tensors, "optimizer": {"state": moments}}, checkpoint_id=directory / "actor")
    dist.destroy_process_group()


def copy(source: Path, target: Path, size: int) -> None:
    """The first bytes of a directory's files."""
    buffer = memoryview(bytearray(CHUNK))
    with target.open("wb", buffering=0) as written:
        for path in sorted(source.glob("*.distcp")):
            with path.open("rb", buffering=0) as read:
                while size and (count := read.readinto(buffer[: min(size, CHUNK)])):
                    written.write(buffer[:count])
                    size -= count
    assert not size


def seconds(work: Callable[..., Any], target: Path, *arguments: Any) -> float:
    """Until all of a new file or directory is on the disk."""
    began = time.monotonic()
    work(*arguments)
    for path in (*target.rglob("*"), target):
        reach_disk(path)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", help="on the disk to measure; what is written there is removed")
    with TemporaryDirectory(dir=parser.parse_args().directory) as name:
        directory = Path(name)
        ranks = multiprocessing.get_context("spawn")
        processes = [ranks.Process(target=save, args=(rank, directory)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        CONFIG.save_pretrained(directory / "actor" / "huggingface")
        source = open_source(directory / "actor")
        size = byte_count(source.meta(None))
        print(f"{len(source.names)} tensors, {size / 1e9:.2f} GB")
        for _ in range(ROUNDS):
            copied = seconds(copy, directory / "copy", directory / "actor", directory / "copy", size)
            merged = seconds(write_model, directory / "merged", source, directory / "merged", None)
            began = time.monotonic()
            check_tensors(source, directory / "merged", None)
            checked = time.monotonic() - began
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            print(
                f"copy {copied:.2f} s ({size / 1e9 / copied:.2f} GB/s)   "
                f"merge {merged:.2f} s, {merged / copied:.2f} times that"
                f"   checks {checked:.2f} s   peak memory {peak:.2f} GiB"
            )
            (directory / "copy").unlink()
            shutil.rmtree(directory / "merged")


if __name__ == "__main__":
    main()

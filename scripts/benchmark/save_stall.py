"""How long training stands still for a save: `python scripts/benchmark/save_stall.py 100 1 2`

Of a model of 100 million parameters, on one rank and on two. The state with AdamW in float32, on CPU, is saved in the
background, is saved while training waits, and as many bytes are copied in memory, on all ranks at once.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch.multiprocessing import spawn
from transformers import AutoModelForCausalLM, Qwen2Config

from hybridrl.config.schema import FSDPConfig, OptimizerConfig, WrapPolicyConfig
from hybridrl.training import attention
from hybridrl.training.fsdp import mesh, shard
from hybridrl.training.model import LanguageModel
from hybridrl.training.optimizer import Optimizers
from hybridrl.training.state import state_of
from hybridrl.training.state_writer import StateWriter

SAVES = 8
WIDTH = 768


def build(millions: int) -> tuple[LanguageModel, Optimizers]:
    """A sharded model of about this size, whose moments have been written to."""
    layers = max(round(millions * 1e6 / (14 * WIDTH**2)), 1)
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=WIDTH,
        intermediate_size=int(10 / 3 * WIDTH),
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=12,
        tie_word_embeddings=True,
    )
    model = LanguageModel(AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME))
    fsdp = FSDPConfig(-1, False, False, True, False, "float32", "float32", WrapPolicyConfig([]))
    sharded = shard(model, fsdp, mesh("cpu", dist.get_world_size(), dist.get_world_size()))
    adamw = OptimizerConfig("AdamW", 1e-4, [0.9, 0.99], 0.0, "constant", -1, 0.0, 0.0, 0.5, -1, 0.02, 0.95)
    optimizers = Optimizers(sharded, adamw, 1)
    for state in optimizers.optimizers[0].state.values():
        for value in state.values():
            value.fill_(0.5)  # memory that was only reserved copies faster than it should
    return sharded, optimizers


def slowest(seconds: float) -> float:
    found = torch.tensor(seconds)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def timed(work: Callable[[], object]) -> float:
    """Seconds until the slowest rank is done."""
    dist.barrier()
    began = time.perf_counter()
    work()
    return slowest(time.perf_counter() - began)


def wait_for(writer: StateWriter) -> None:
    while not writer.finished():
        time.sleep(0.005)


def measure(rank: int, ranks: int, millions: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/store", ranks), rank=rank, world_size=ranks)
    model, optimizers = build(millions)
    writer, size, stalls, writes, copies = StateWriter("cpu"), 0, [], [], []

    def start(step: int) -> None:
        nonlocal size
        state = state_of(model, optimizers, ("model", "optimizer", "extra"))
        size = writer.start({Path(directory, str(step), "actor"): state})

    first = timed(partial(start, 0))
    wait_for(writer)
    source, target = torch.full((size,), 1, dtype=torch.uint8), torch.full((size,), 2, dtype=torch.uint8)
    for step in range(1, SAVES):
        copies.append(timed(partial(target.copy_, source)))
        stalls.append(timed(partial(start, step)))
        writes.append(stalls[-1] + timed(partial(wait_for, writer)))
    if rank == 0:
        ratio = median(stall / copy for stall, copy in zip(stalls, copies, strict=True))
        print(
            f"{ranks} ranks: {ranks * size / 2**30:.2f} GiB of state, as much in host memory for the copy\n"
            f"  copied in memory {median(copies):.3f} s\n"
            f"  stall of the first save {first:.3f} s, from the second on {median(stalls):.3f} s "
            f"({min(stalls):.3f} to {max(stalls):.3f}): {ratio:.2f} x the copy beside it\n"
            f"  a save that training waits for {median(writes):.3f} s",
            flush=True,
        )
    dist.destroy_process_group()


def main(millions: int = 100, *ranks: int) -> None:
    for number in ranks or (1, 2):
        with TemporaryDirectory() as directory:
            spawn(measure, (number, millions, directory), nprocs=number)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

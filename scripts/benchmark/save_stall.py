"""How long a save stops training: `python scripts/benchmark/save_stall.py --shape 0.5b`

For a model with random weights, on one rank and on two. The state with AdamW in float32, on CPU, is saved in the
background, is saved while training waits, and as many bytes are copied in memory, on all ranks at once. Qwen2.5-0.5B's
shapes take 13 GiB of memory (5.5 for parameters and moments, 5.5 for the staging buffer, the rest for two processes),
and 11 GiB of disk space.
"""

import json
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from models import SHAPES, sharded_model
from side_by_side import Arguments
from torch.multiprocessing import spawn

from hybridrl.config.schema import OptimizerConfig
from hybridrl.core.training.model import LanguageModel
from hybridrl.core.training.optimizer import Optimizers
from hybridrl.core.training.state import StateWriter, state_of

BLOCK = 256 << 20  # of the copy in memory, much larger than a processor's caches
GIB = 2**30


def build(shape: str) -> tuple[LanguageModel, Optimizers]:
    """Return a sharded model and optimizers whose moments have been written to."""
    model = sharded_model(shape)
    adamw = OptimizerConfig("AdamW", 1e-4, [0.9, 0.99], 0.0, False, "constant", -1, 0.0, 0.0, 0.5, 0.9, 0.02, 0.95, {})
    optimizers = Optimizers(model, adamw, 1)
    for state in optimizers.optimizers[0].state.values():
        for value in state.values():
            value.fill_(0.5)  # untouched memory would be copied too fast
    return model, optimizers


def slowest(seconds: float) -> float:
    maximum = torch.tensor(seconds)
    dist.all_reduce(maximum, dist.ReduceOp.MAX)
    return float(maximum)


def timed(work: Callable[[], object]) -> float:
    """Return seconds until the slowest rank is done."""
    dist.barrier()
    began = time.perf_counter()
    work()
    return slowest(time.perf_counter() - began)


def wait_for(writer: StateWriter) -> None:
    while not writer.finished():
        time.sleep(0.005)


def copy_in_memory(source: torch.Tensor, target: torch.Tensor, size: int) -> None:
    for first in range(0, size, len(source)):
        target[: size - first].copy_(source[: size - first])


def measure(rank: int, ranks: int, shape: str, saves: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/store", ranks), rank=rank, world_size=ranks)
    model, optimizers = build(shape)
    writer, size = StateWriter("cpu"), 0

    def start(step: int) -> None:
        nonlocal size
        state = state_of(model, optimizers, ("model", "optimizer", "extra"))
        size = writer.start({Path(directory, str(step), "actor"): state})

    first = timed(partial(start, 0))
    wait_for(writer)
    source, target = torch.full((BLOCK,), 1, dtype=torch.uint8), torch.full((BLOCK,), 2, dtype=torch.uint8)
    stalls, writes, copies = [], [], []
    for step in range(1, saves):
        copies.append(timed(partial(copy_in_memory, source, target, size)))
        stalls.append(timed(partial(start, step)))
        writes.append(stalls[-1] + timed(partial(wait_for, writer)))
        if rank == 0:
            shutil.rmtree(Path(directory, str(step - 1)))
    if rank == 0:
        figures = {"bytes": ranks * size, "first": first, "stalls": stalls, "waited_for": writes, "copies": copies}
        Path(directory, "figures.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


def print_figures(ranks: int, figures: dict[str, Any]) -> None:
    stalls, copies = figures["stalls"], figures["copies"]
    ratio = median(stall / copy for stall, copy in zip(stalls, copies, strict=True))
    print(
        f"{ranks} ranks: {figures['bytes'] / GIB:.2f} GiB of state; the staging buffer has the same size\n"
        f"  copied in memory {median(copies):.3f} s\n"
        f"  stall of the first save {figures['first']:.3f} s, from the second on {median(stalls):.3f} s "
        f"({min(stalls):.3f} to {max(stalls):.3f}): {ratio:.2f} x the copy next to it\n"
        f"  a save that training waits for {median(figures['waited_for']):.3f} s",
        flush=True,
    )


def main() -> None:
    parser = Arguments(__doc__, shape="tiny", ranks=[2], saves=2)
    parser.add_argument("--shape", choices=SHAPES, default="100m")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--saves", type=int, default=8, help="of which the first is counted separately")
    parser.add_argument("--directory", help="on the disk to measure; what is written there is removed")
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    arguments, figures = parser.parse_args(), {}
    for ranks in arguments.ranks:
        with TemporaryDirectory(dir=arguments.directory) as directory:
            spawn(measure, (ranks, arguments.shape, arguments.saves, directory), nprocs=ranks)
            figures[ranks] = json.loads(Path(directory, "figures.json").read_text())
        print_figures(ranks, figures[ranks])
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()

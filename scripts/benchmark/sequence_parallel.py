"""The memory that two ranks save by sharing long rows: `python scripts/benchmark/sequence_parallel.py`

Two ranks on CPU, a model of 25 million parameters in float32 sharded over both, without gradient checkpointing and
without its head, whose logits are computed in chunks; two rows. Either each rank has one row, or both share one and
then the other. Memory is the peak of forward and backward pass minus the memory before.
"""

import argparse
import os
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from models import SHAPES, sharded_model
from side_by_side import Row, arguments, report
from torch.multiprocessing import spawn

from hybridrl.core.batch import Batch
from hybridrl.core.training.attention import sequence_group, slice_of
from hybridrl.core.training.packing import pack_rows

RANKS, SHORT = 2, 64


def row(tokens: int, vocabulary: int) -> Batch:
    ids, number = torch.arange(tokens) * 37 % vocabulary, torch.zeros(1, dtype=torch.int64)
    lengths = torch.tensor([1]), torch.tensor([tokens - 1])
    return Batch(*lengths, ids[:1], ids[1:], group=number, position=number, sample=number)


def peak_bytes(status: str = "VmHWM") -> int:
    """Return this process's peak memory since it was last reset; for `VmRSS` the present size."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(status))


def rank(number: int, shape: str, sharing: int, tokens: int, directory: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store-{sharing}", RANKS)
    dist.init_process_group("gloo", store=store, rank=number, world_size=RANKS)
    model, group = sharded_model(shape), sequence_group(sharing, 600.0)
    vocabulary = min(4096, SHAPES[shape]["vocab_size"])

    def update(length: int) -> None:
        model.hidden_states(
            slice_of(pack_rows(row(length, vocabulary), padded=False), group)
        ).square().mean().backward()

    update(SHORT)
    before = peak_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    dist.barrier()
    began = time.perf_counter()
    for _ in range(sharing):  # two rows in total
        update(tokens)
    dist.barrier()
    torch.save((peak_bytes() - before, time.perf_counter() - began), f"{directory}/{sharing}-{number}")
    dist.destroy_process_group()


def measured(shape: str, tokens: int, rounds: int) -> dict[int, list[tuple[float, float]]]:
    """Return memory, of the larger rank, and seconds of every round, by how many ranks share a row."""
    rounds_of: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    for _ in range(rounds):
        for sharing, rows in rounds_of.items():
            with TemporaryDirectory() as directory:
                spawn(partial(rank), args=(shape, sharing, tokens, directory), nprocs=RANKS)
                rows.append(max(torch.load(f"{directory}/{sharing}-{number}") for number in range(RANKS)))
    return rounds_of


def main(options: argparse.Namespace) -> None:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # in the ranks: freed memory is returned to the system at once
    rows, least = [], {}
    for tokens in options.tokens:
        by_sharing = measured(options.shape, tokens, options.rounds)
        memory, seconds = (
            [min(values[kind] for values in by_sharing[sharing]) for sharing in (2, 1)] for kind in (0, 1)
        )
        least[tokens] = memory
        rows.append(as_row(f"memory per rank, rows of {tokens} tokens", memory, "MiB", 2**20))
        rows.append(as_row(f"two rows of {tokens} tokens", seconds, "s", 1))
    (low, high), span = (least[length] for length in options.tokens), options.tokens[1] - options.tokens[0]
    slopes = [(b - a) / span for a, b in zip(low, high, strict=True)]
    rows.append(as_row("memory per rank and additional token", slopes, "KiB", 1024, target="about 0.5"))
    report(rows, options.json)


def as_row(what: str, values: list[float], unit: str, size: float, target: str = "") -> Row:
    """Return a row: two ranks that share rows, compared with ranks that do not."""
    ours, other = (f"{value / size:.3g} {unit}" for value in values)
    return Row(what, ours, other, values[0] / values[1], target)


if __name__ == "__main__":
    parser = arguments(__doc__, shape="tiny", tokens=[512, 1024])
    parser.add_argument("--shape", choices=SHAPES, default="25m")
    parser.add_argument("--tokens", type=int, nargs=2, default=[1024, 2048], metavar=("SHORT", "LONG"))
    parser.add_argument("--rounds", type=int, default=1)
    main(parser.parse_args())

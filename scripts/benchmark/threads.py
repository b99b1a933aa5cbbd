"""Ways for threads to wait for each other on a CPU: `python scripts/benchmark/threads.py`

A worker's way (hybridrl/core/spinning.py: long spinning that gives way to other programs) next to spinning for long,
for a short time and not at all (GOMP_SPINCOUNT), on all cores: many small products with Python between them, and an
update of 25 million parameters; alone, and next to a program that uses one core.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from child import Child, serve
from compiled import side
from models import SHAPES
from side_by_side import ROUNDS, Row, arguments, formatted, in_turn, report

from hybridrl.core.spinning import INTERVAL, give_way
from hybridrl.runtime.environment import WAITING, worker_environment

OURS = "a worker's way"
WAITS = {
    OURS: WAITING,
    "300,000 spins": {"GOMP_SPINCOUNT": "300000"},
    "5,000 spins": {"GOMP_SPINCOUNT": "5000"},
    "none": {"GOMP_SPINCOUNT": "0"},
}


def work(options: argparse.Namespace) -> None:
    """Compute on request; the process of a side."""
    if options.give_way:
        give_way()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows, weights, update = torch.randn(128, 384), torch.randn(384, 1280), side(options.shape)

    def products() -> None:
        for _ in range(options.products):
            torch.nn.functional.silu(rows @ weights)

    serve(options.pipes, {"products": products, "update": partial(update, 0)})


@contextmanager
def busy() -> Iterator[None]:
    """Run a program that uses one core."""
    program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(3 * INTERVAL)  # until the load has been read
        yield
    finally:
        program.kill()
        program.wait()


def measured(directory: Path, options: argparse.Namespace) -> list[Row]:
    sizes = ["--shape", options.shape, "--products", str(options.products)]
    common = {name: value for name, value in worker_environment("cpu", 1).items() if name not in WAITING}
    with ExitStack() as stack:
        sides = {}
        for number, (name, variables) in enumerate(WAITS.items()):
            command = [sys.executable, __file__, *sizes, *["--give-way"] * (name == OURS)]
            sides[name] = stack.enter_context(Child(command, directory / f"{number}.log", common | variables))
        rows = compared(sides, "", options)
        stack.enter_context(busy())
        return rows + compared(sides, ", busy machine", options)


def compared(sides: dict[str, Child], load: str, options: argparse.Namespace) -> list[Row]:
    rows, parameters = [], options.shape.replace("m", " M")
    functions = {
        "products": f"{options.products:,} products of 128 x 384 x 1,280",
        "update": f"an update of {parameters} parameters",
    }
    for function, what in functions.items():
        seconds_of = in_turn({name: partial(child.call, function) for name, child in sides.items()}, options.rounds)
        ours = seconds_of.pop(OURS)
        for name, seconds in seconds_of.items():
            row = f"{what} over {name}{load}"
            rows.append(Row(row, formatted(ours), formatted(seconds), ours.median / seconds.median))
    return rows


def main() -> None:
    parser = arguments(__doc__, shape="tiny", products=20, rounds=1)
    parser.add_argument("--shape", choices=SHAPES, default="25m")
    parser.add_argument("--products", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--pipes", help="pipes of a side's process")
    parser.add_argument("--give-way", action="store_true", help="for a side's process")
    options = parser.parse_args()
    if options.pipes:
        return work(options)
    with TemporaryDirectory() as place:
        report(measured(Path(place), options), options.json)


if __name__ == "__main__":
    main()

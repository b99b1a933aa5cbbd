"""How long a waiting thread should spin before it sleeps: `python scripts/benchmark/threads.py`

The settings of a trainer and of an engine (GOMP_SPINCOUNT) and no spinning, on all cores: many small products with
Python between them, and an update of 25 million parameters; alone, and next to a program that uses one core.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from child import Child, serve
from compiled import side
from side_by_side import Row, arguments, formatted, in_turn, report

from hybridrl.rollout.vllm.settings import ENVIRONMENT
from hybridrl.runtime.environment import worker_environment

TRAINERS = "the trainer's"
WAITS = {
    TRAINERS: worker_environment("cpu", 1)["GOMP_SPINCOUNT"],
    "the engine's": ENVIRONMENT["GOMP_SPINCOUNT"],
    "none": "0",
}
WORK = {"products": "2,000 products of 128 rows, 384 x 1,280", "update": "an update of 25 M parameters, 8 rows"}


def work(pipes: str) -> None:
    """Compute on request; the process of a side."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows, weights, update = torch.randn(128, 384), torch.randn(384, 1280), side(compiled=False)

    def products() -> None:
        for _ in range(2000):
            torch.nn.functional.silu(rows @ weights)

    serve(pipes, {"products": products, "update": partial(update, 0)})


@contextmanager
def busy() -> Iterator[None]:
    """Run a program that uses one core."""
    program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        program.kill()
        program.wait()


def measured(directory: Path, load: str) -> list[Row]:
    rows = []
    with ExitStack() as stack:
        sides = {}
        for name, wait in WAITS.items():
            environment = worker_environment("cpu", 1) | {"GOMP_SPINCOUNT": wait}
            command = [sys.executable, __file__]
            sides[name] = stack.enter_context(Child(command, directory / f"{wait}.log", environment))
        if load:
            stack.enter_context(busy())
        for function, what in WORK.items():
            seconds_of = in_turn({name: partial(child.call, function) for name, child in sides.items()})
            usual = seconds_of.pop(TRAINERS)
            for name, seconds in seconds_of.items():
                row = f"{what}, wait {name} over {TRAINERS}{load}"
                rows.append(Row(row, formatted(seconds), formatted(usual), seconds.median / usual.median))
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--pipes", help="pipes of a side's process")
    options = parser.parse_args()
    if options.pipes:
        return work(options.pipes)
    with TemporaryDirectory() as place:
        report([row for load in ("", ", next to a busy program") for row in measured(Path(place), load)], options.json)


if __name__ == "__main__":
    main()

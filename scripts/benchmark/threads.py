"""How long a thread that waits for others should spin before it sleeps: `python scripts/benchmark/threads.py`

The waits of a trainer and of an engine (GOMP_SPINCOUNT) and none, on all cores: many small products with Python between
them, and an update of 25 million parameters; alone, and beside a program that takes a whole core.
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
from side_by_side import Row, arguments, in_turn, report, told

from hybridrl import device as devices
from hybridrl.rollout.server import ENVIRONMENT

TRAINERS = "a trainer's"
WAITS = {
    TRAINERS: devices.environment("cpu", 1)["GOMP_SPINCOUNT"],
    "an engine's": ENVIRONMENT["GOMP_SPINCOUNT"],
    "none": "0",
}
WORK = {"products": "2,000 products of 128 rows, 384 x 1,280", "update": "an update of 25 M parameters, 8 rows"}


def answer(pipes: str) -> None:
    """Compute what is asked for; a side's process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows, weights, update = torch.randn(128, 384), torch.randn(384, 1280), side(compiled=False)

    def products() -> None:
        for _ in range(2000):
            torch.nn.functional.silu(rows @ weights)

    serve(pipes, {"products": products, "update": partial(update, 0)})


@contextmanager
def busy() -> Iterator[None]:
    """Beside a program that takes a whole core."""
    program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        program.kill()
        program.wait()


def measured(directory: Path, beside: str) -> list[Row]:
    rows = []
    with ExitStack() as stack:
        sides = {}
        for name, wait in WAITS.items():
            environment = devices.environment("cpu", 1) | {"GOMP_SPINCOUNT": wait}
            command = [sys.executable, __file__]
            sides[name] = stack.enter_context(Child(command, directory / f"{wait}.log", environment))
        if beside:
            stack.enter_context(busy())
        for work, what in WORK.items():
            found = in_turn({name: partial(child.ask, work) for name, child in sides.items()})
            usual = found.pop(TRAINERS)
            for name, seconds in found.items():
                value = seconds.median / usual.median
                rows.append(Row(f"{what}, wait {name} over {TRAINERS}{beside}", told(seconds), told(usual), value))
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--pipes", help="of a side's process")
    given = parser.parse_args()
    if given.pipes:
        return answer(given.pipes)
    with TemporaryDirectory() as place:
        report([row for beside in ("", ", beside a busy program") for row in measured(Path(place), beside)], given.json)


if __name__ == "__main__":
    main()

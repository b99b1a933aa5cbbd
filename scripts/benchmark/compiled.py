"""What torch.compile would gain an update on CPU: `OMP_NUM_THREADS=1 python scripts/benchmark/compiled.py`

A model of 25 million parameters in float32, sharded over one rank; forward and backward pass of eight rows in one line,
as it is, and with every decoder layer compiled.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from models import sharded_model
from side_by_side import Row, arguments, in_turn, report, told

from hybridrl.batch import Batch
from hybridrl.training.packing import lay_out

ROWS = 8


def batch(seed: int) -> Batch:
    """Rows of 80 to 260 tokens."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(20, 60, (ROWS,), generator=generator)
    responses = torch.randint(60, 200, (ROWS,), generator=generator)
    ids = (torch.randint(4096, (int(lengths.sum()),), generator=generator) for lengths in (prompts, responses))
    numbers = torch.arange(ROWS)
    return Batch(prompts, responses, *ids, group=numbers, position=numbers, sample=numbers)


def side(*, compiled: bool) -> Callable[[int], None]:
    """An update of rows drawn from a seed, by a model of its own."""
    model = sharded_model("25m")
    for layer in model.model.model.layers if compiled else ():
        layer.compile(dynamic=True)

    def update(seed: int) -> None:
        model(lay_out(batch(seed), padded=False), 1.0, entropies=True).log_probs.mean().backward()
        model.zero_grad()

    return update


def seconds_to_begin(update: Callable[[int], None]) -> float:
    """Of the first two updates, of rows of different lengths, in processor time."""
    began = time.process_time()
    update(1)
    update(2)
    return time.process_time() - began


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sides = {"as it is": side(compiled=False), "layers compiled": side(compiled=True)}
    first = {name: seconds_to_begin(update) for name, update in sides.items()}
    found = in_turn({name: lambda update=update: update(0) for name, update in sides.items()})
    usual, compiled = found.values()
    began = (f"{seconds:.0f} s of processor time" for seconds in reversed(first.values()))
    rows = [
        Row("update, layers compiled", told(compiled), told(usual), usual.median / compiled.median),
        Row("first two updates, layers compiled", *began),
    ]
    report(rows, options.json)


if __name__ == "__main__":
    main()

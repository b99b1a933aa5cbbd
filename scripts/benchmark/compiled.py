"""What an update on CPU would gain from torch.compile: `OMP_NUM_THREADS=1 python scripts/benchmark/compiled.py`

A model of 25 million parameters in float32, sharded over one rank; forward and backward pass of eight packed rows,
as it is, and with every decoder layer compiled.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from models import SHAPES, sharded_model
from side_by_side import ROUNDS, Row, arguments, formatted, in_turn, report

from hybridrl.core.batch import Batch
from hybridrl.core.training.packing import pack_rows

ROWS = 8


def batch(seed: int, vocabulary: int) -> Batch:
    """Return rows of 80 to 260 tokens."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(20, 60, (ROWS,), generator=generator)
    responses = torch.randint(60, 200, (ROWS,), generator=generator)
    ids = (torch.randint(vocabulary, (int(lengths.sum()),), generator=generator) for lengths in (prompts, responses))
    numbers = torch.arange(ROWS)
    return Batch(prompts, responses, *ids, group=numbers, position=numbers, sample=numbers)


def side(shape: str, backend: str = "") -> Callable[[int], None]:
    """Return an update of rows drawn from a seed, with a separate model, compiled if there is a backend."""
    model, vocabulary = sharded_model(shape), min(4096, SHAPES[shape]["vocab_size"])
    for layer in model.model.model.layers if backend else ():
        layer.compile(dynamic=True, backend=backend)

    def update(seed: int) -> None:
        model(pack_rows(batch(seed, vocabulary), padded=False), 1.0, entropies=True).log_probs.mean().backward()
        model.zero_grad()

    return update


def seconds_to_begin(update: Callable[[int], None]) -> float:
    """Return the processor time of the first two updates, with rows of different lengths."""
    began = time.process_time()
    update(1)
    update(2)
    return time.process_time() - began


def main() -> None:
    parser = arguments(__doc__, shape="tiny", backend="aot_eager", rounds=1)
    parser.add_argument("--shape", choices=SHAPES, default="25m")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sides = {
        "as it is": side(options.shape),
        "layers compiled": side(options.shape, options.backend),
    }
    first = {name: seconds_to_begin(update) for name, update in sides.items()}
    seconds = in_turn({name: lambda update=update: update(0) for name, update in sides.items()}, options.rounds)
    usual, compiled = seconds.values()
    first_seconds = (f"{value:.0f} s of processor time" for value in reversed(first.values()))
    rows = [
        Row("update, layers compiled", formatted(compiled), formatted(usual), usual.median / compiled.median),
        Row("first two updates, layers compiled", *first_seconds),
    ]
    report(rows, options.json)


if __name__ == "__main__":
    main()

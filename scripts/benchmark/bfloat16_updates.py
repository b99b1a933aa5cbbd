"""How many elements of a weight an update changes if parameters are stored in bfloat16, by learning rate.

    python scripts/benchmark/bfloat16_updates.py

AdamW with random gradients, on normal weights with a standard deviation of 0.02 (the usual initializer_range). Prints
the share of elements changed by the first update, whose size is the learning rate for every element, and by the last.
"""

import torch
from side_by_side import Arguments
from torch.optim import AdamW

DEVIATION = 0.02


def shares(lr: float, dtype: torch.dtype, elements: int, updates: int) -> list[float]:
    """Return the share of elements that each update changes."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter((DEVIATION * torch.randn(elements, generator=generator)).to(dtype))
    optimizer, changed = AdamW([weight], lr=lr, weight_decay=0.01), []
    for _ in range(updates):
        before = weight.detach().clone()
        weight.grad = torch.randn(elements, generator=generator).to(dtype)
        optimizer.step()
        changed.append(float((weight != before).float().mean()))
    return changed


def main() -> None:
    parser = Arguments(__doc__, elements=1024, updates=2)
    parser.add_argument("--elements", type=int, default=1 << 20, help="of the weight")
    parser.add_argument("--updates", type=int, default=50)
    options = parser.parse_args()
    print(f"| learning rate | type | first update | update {options.updates} |\n|---|---|--:|--:|")
    for lr in (1e-6, 1e-5, 1e-4, 1e-3):
        for dtype in (torch.bfloat16, torch.float32):
            first, *_, last = shares(lr, dtype, options.elements, options.updates)
            print(f"| {lr:g} | {str(dtype).removeprefix('torch.')} | {first:.2%} | {last:.2%} |")


if __name__ == "__main__":
    main()

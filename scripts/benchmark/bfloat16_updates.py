"""How many elements of a weight an update changes if parameters are stored in bfloat16, by learning rate.

    python scripts/benchmark/bfloat16_updates.py

AdamW with random gradients, on normal weights with a standard deviation of 0.02 (the usual initializer_range). Prints
the share of elements changed by the first update, whose size is the learning rate for every element, and by the 50th.
"""

import torch
from torch.optim import AdamW

ELEMENTS, DEVIATION, UPDATES = 1 << 20, 0.02, 50


def shares(lr: float, dtype: torch.dtype) -> list[float]:
    """Return the share of elements that each update changes."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter((DEVIATION * torch.randn(ELEMENTS, generator=generator)).to(dtype))
    optimizer, changed = AdamW([weight], lr=lr, weight_decay=0.01), []
    for _ in range(UPDATES):
        before = weight.detach().clone()
        weight.grad = torch.randn(ELEMENTS, generator=generator).to(dtype)
        optimizer.step()
        changed.append(float((weight != before).float().mean()))
    return changed


if __name__ == "__main__":
    print("| learning rate | type | first update | 50th |\n|---|---|--:|--:|")
    for lr in (1e-6, 1e-5, 1e-4, 1e-3):
        for dtype in (torch.bfloat16, torch.float32):
            first, *_, last = shares(lr, dtype)
            print(f"| {lr:g} | {str(dtype).removeprefix('torch.')} | {first:.2%} | {last:.2%} |")

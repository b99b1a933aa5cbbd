"""Layers that carry something along the text by other means than attention, such as a convolution or a recurrence, take
the rows of a line one by one: nothing of a row then reaches the next, and attention and the rest keep their line."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from hybridrl.training.packing import Line


def take_rows_apart(model: nn.Module) -> None:
    """Change the layers with a convolution of their own, which nearly all such families have; `rows_mix` finds out
    where this did not do."""
    for module in model.modules():
        if any(isinstance(child, nn.Conv1d) for child in module.children()):
            module.forward = partial(_row_by_row, module.forward)


def _row_by_row(
    forward: Callable[..., Tensor],
    hidden_states: Tensor,  # [1, T, width] in one line, or [B, T, width]
    *arguments: object,
    line: Line | None = None,
    **options: object,
) -> Tensor:
    in_slices = line is not None and line.group is not None  # of which no rows can be made
    if line is None or in_slices or any(isinstance(value, Tensor) for value in arguments):
        return forward(hidden_states, *arguments, **options)
    rows = hidden_states.split(line.lengths, dim=1)
    return torch.cat([forward(row, *arguments, **options) for row in rows], dim=1)

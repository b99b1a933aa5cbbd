"""Agreement of two computations of the same log-probs, up to the rounding error of their type."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

# Allowed differences between two correct computations of log-probs, for every model: on average, and for a single
# token. In small models 1e-6 to 1e-5 were measured in float32, and 0.04 to 0.07 on average in bfloat16, where only
# gross faults are detected. A model with more rounding error is allowed MULTIPLES of its measured error (one sample).
LIMITS = {"float32": (1e-4, 1e-4), "float16": (0.02, 0.5), "bfloat16": (0.1, 2.0)}
# The limits hold down to a mean log-prob of -TYPICAL and grow with it, as rounding is relative to the logits, which
# are large where a policy has collapsed.
TYPICAL = 10.0
MULTIPLES = (4.0, 8.0)


def coarser(*dtypes: str) -> str:
    """Return the type whose rounding is the largest."""
    return max(dtypes, key=lambda name: LIMITS[name])


@contextmanager
def rounded_otherwise(dtype: str) -> Iterator[None]:
    """Compute with the last bit of the type flipped in the outputs of all modules with weights: as correct, and as
    different, as with another order of the sums. Needs no memory and no random numbers, on any device and shard."""

    def flip(module: nn.Module, _inputs: Any, output: Any) -> Any:
        weight = next(module.parameters(recurse=False), None)
        if weight is None or type(output) is not Tensor or not output.is_floating_point():
            return output
        bit = torch.finfo(getattr(torch, dtype)).eps / torch.finfo(output.dtype).eps
        integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[output.itemsize]
        return (output.view(integers) ^ int(max(bit, 1))).view(output.dtype)

    with register_module_forward_hook(flip), torch.compiler.set_stance("force_eager"):  # compiled layers have no hooks
        yield


def beyond_rounding(computed: Tensor, expected: Tensor, dtype: str, again: Tensor) -> str:
    """Describe the difference between `computed` and `expected` log-probs [tokens]; empty if rounding explains it. One
    of the two was computed in `dtype`; `again` is a computation of this model within `rounded_otherwise`."""
    sides = [(side - expected).abs().masked_fill(side == expected, 0.0) for side in (computed, again)]  # -inf if masked
    (mean, largest), measured = ((float(gaps.mean()), float(gaps.max())) for gaps in sides)
    level = float(expected[expected > -math.inf].mean())
    limits = [max(limit, times * gap) for limit, times, gap in zip(LIMITS[dtype], MULTIPLES, measured, strict=True)]
    on_average, at_most = (limit * max(1.0, -level / TYPICAL) for limit in limits)
    if mean <= on_average and largest <= at_most:
        return ""
    return (
        f"by {mean:.3g} on average and {largest:.3g} at most, at a mean of {level:.3g} "
        f"({on_average:.3g} and {at_most:.3g} are allowed)"
    )

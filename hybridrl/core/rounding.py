"""Agreement of two computations of the same log-probs, as far as the rounding of their type explains differences."""

import math

from torch import Tensor

# Largest allowed differences between two right computations of log-probs: on average, and of one token. In float32 1e-6
# to 1e-5 were measured, and one update at the quickstart's learning rate causes more than 0.1. In bfloat16 rounding
# alone causes 0.04 to 0.07 on average. Single tokens differ by more: by 0.28 to 0.55 in models of 0.5 B parameters
# whose logits have the standard deviation of trained ones (4.5), or where rounding selects another expert. So in
# bfloat16 only gross faults are detected.
LIMITS = {"float32": (1e-4, 1e-4), "float16": (0.02, 0.5), "bfloat16": (0.1, 2.0)}
# The limits hold down to a mean log-prob of -TYPICAL and grow with it, as rounding is relative to the logits, which
# are large where a policy has collapsed.
TYPICAL = 10.0


def coarser(*dtypes: str) -> str:
    """Return the type whose rounding is the largest."""
    return max(dtypes, key=lambda name: LIMITS[name])


def beyond_rounding(computed: Tensor, expected: Tensor, dtype: str) -> str:
    """Describe by how much these log-probs [tokens], of which one side was computed in `dtype`, differ from what is
    expected; empty if rounding explains it."""
    gaps = (computed - expected).abs().masked_fill(computed == expected, 0.0)  # also of masked tokens: both are -inf
    level = float(expected[expected > -math.inf].mean())
    mean, largest = float(gaps.mean()), float(gaps.max())
    on_average, at_most = (limit * max(1.0, -level / TYPICAL) for limit in LIMITS[dtype])
    if mean <= on_average and largest <= at_most:
        return ""
    return (
        f"by {mean:.3g} on average and {largest:.3g} at most, at a mean of {level:.3g} "
        f"({on_average:.3g} and {at_most:.3g} are allowed)"
    )

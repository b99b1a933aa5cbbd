"""Differences of log-probs that are rounding."""

import pytest
import torch

from hybridrl.core.rounding import beyond_rounding, coarser

LEVEL = torch.full((12,), -2.0)


def gaps(mean: float, largest: float) -> torch.Tensor:
    """Twelve log-probs with these differences from LEVEL."""
    found = LEVEL + (12 * mean - largest) / 11
    found[5] = LEVEL[5] + largest
    return found


@pytest.mark.parametrize(
    ("dtype", "mean", "largest", "differ"),
    [
        ("bfloat16", 0.09, 0.55, False),  # seen at a token of a right computation
        ("bfloat16", 0.09, 1.05, False),
        ("bfloat16", 0.11, 0.2, True),
        ("bfloat16", 0.19, 2.1, True),
        ("float16", 0.015, 0.1, False),
        ("float16", 0.03, 0.1, True),
        ("float32", 0.00009, 0.00009, False),
        ("float32", 0.00005, 0.0002, True),
    ],
)
def test_the_type_sets_what_is_allowed_on_average_and_at_most(dtype, mean, largest, differ):
    assert bool(beyond_rounding(gaps(mean, largest), LEVEL, dtype)) is differ


def test_what_is_not_a_number_differs():
    assert beyond_rounding(torch.full((12,), float("nan")), LEVEL, "bfloat16")


def test_masked_tokens_agree_with_one_another_only():
    masked = LEVEL.index_fill(0, torch.tensor(3), -torch.inf)
    assert not beyond_rounding(masked + 0.00005, masked, "float32")
    assert beyond_rounding(masked + 0.0002, masked, "float32")
    assert beyond_rounding(masked, LEVEL, "bfloat16") and beyond_rounding(LEVEL, masked, "bfloat16")


def test_the_description_has_the_differences_and_what_is_allowed():
    assert beyond_rounding(LEVEL + 0.5, LEVEL, "float32") == (
        "by 0.5 on average and 0.5 at most, at a mean of -2 (0.0001 and 0.0001 are allowed)"
    )


def test_the_coarser_type_counts():
    assert coarser("float32", "bfloat16") == coarser("bfloat16", "float16") == "bfloat16"

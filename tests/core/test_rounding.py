"""Differences of log-probs that are rounding."""

from copy import deepcopy
from itertools import chain

import pytest
import torch
from torch import Tensor, nn

from hybridrl.core.rounding import MULTIPLES, beyond_rounding, coarser, rounded_otherwise
from hybridrl.required import required

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
    assert bool(beyond_rounding(gaps(mean, largest), LEVEL, dtype, LEVEL)) is differ


def test_what_is_not_a_number_differs():
    nan = torch.full((12,), float("nan"))
    assert beyond_rounding(nan, LEVEL, "bfloat16", LEVEL) and beyond_rounding(LEVEL + 3, LEVEL, "bfloat16", nan)


def test_masked_tokens_agree_with_one_another_only():
    masked = LEVEL.index_fill(0, torch.tensor(3), -torch.inf)
    assert not beyond_rounding(masked + 0.00005, masked, "float32", masked)
    assert beyond_rounding(masked + 0.0002, masked, "float32", masked)
    assert beyond_rounding(masked, LEVEL, "bfloat16", LEVEL) and beyond_rounding(LEVEL, masked, "bfloat16", masked)


def test_the_description_has_the_differences_and_what_is_allowed():
    assert beyond_rounding(LEVEL + 0.5, LEVEL, "float32", LEVEL) == (
        "by 0.5 on average and 0.5 at most, at a mean of -2 (0.0001 and 0.0001 are allowed)"
    )


def test_the_coarser_type_counts():
    assert coarser("float32", "bfloat16") == coarser("bfloat16", "float16") == "bfloat16"


@pytest.mark.parametrize(("mean", "largest", "differ"), [(0.0003, 0.0007, False), (0.0003, 0.0009, True)])
def test_a_model_that_rounds_more_is_allowed_a_multiple_of_what_was_measured_of_it(mean, largest, differ):
    again = gaps(0.0004 / MULTIPLES[0], 0.0008 / MULTIPLES[1])
    assert bool(beyond_rounding(gaps(mean, largest), LEVEL, "float32", again)) is differ
    assert beyond_rounding(gaps(0.0005, 0.0007), LEVEL, "float32", again)  # each limit by itself


def log_probs(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids[:-1]).double().log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)


@pytest.fixture
def toy() -> tuple[nn.Module, Tensor]:
    """A model whose logits are as large as trained ones, with small weights between norms, of which an update at 1e-6
    changes as much as of a large model, and a sequence."""
    torch.manual_seed(0)
    layers = [[nn.RMSNorm(128, eps=1e-12), nn.Linear(128, 128, bias=False), nn.GELU()] for _ in range(8)]
    norm, head = nn.RMSNorm(128, eps=1e-12), nn.Linear(128, 512, bias=False)
    model = nn.Sequential(nn.Embedding(512, 128), *chain(*layers), norm, head)
    for value in model.parameters():
        if value.ndim == 2:
            nn.init.normal_(value, std=0.8 if value is head.weight else 1e-3)
    return model, torch.randint(512, (24,))


@pytest.mark.parametrize(("trainer", "engine"), [("float32",) * 2, ("bfloat16",) * 2, ("float32", "bfloat16")])
@torch.no_grad()
def test_the_rounding_of_a_model_is_measured_in_the_coarser_type_and_leaves_no_trace(toy, trainer, engine):
    (model, ids), coarse = toy, getattr(torch, engine)
    gap = (log_probs(deepcopy(model).to(coarse), ids) - log_probs(deepcopy(model).double(), ids)).abs().mean()
    expected = log_probs(model.to(getattr(torch, trainer)), ids)
    with rounded_otherwise(coarser(trainer, engine)):
        measured = (log_probs(model, ids) - expected).abs().mean()
    assert 0.5 < measured / gap < 8
    assert torch.equal(log_probs(model, ids), expected)


STALE = {  # places are those of modules in the model
    "one layer": lambda place, value: torch.full_like(value, place == 8),
    "one bucket": lambda place, value: torch.full_like(value, 10 < place < 20),
    "the embedding": lambda place, value: torch.full_like(value, place == 0),
    "a thousandth": lambda place, value: torch.rand_like(value) < 1e-3,
}


@pytest.mark.parametrize("part", STALE)
def test_a_part_that_an_update_at_1e_6_has_not_reached_is_beyond_the_model_s_rounding(toy, part):
    model, ids = toy
    old = deepcopy(model).double()
    log_probs(model, ids).sum().backward()
    with torch.no_grad():
        for value in model.parameters():
            value += 1e-6 * required(value.grad).sign()
        expected, engine = log_probs(model, ids), deepcopy(model).double()
        with rounded_otherwise("float32"):
            again = log_probs(model, ids)
        assert not beyond_rounding(log_probs(engine, ids), expected, "float32", again)
        for (name, value), before in zip(engine.named_parameters(), old.parameters(), strict=True):
            value.copy_(torch.where(STALE[part](int(name.split(".")[0]), value).bool(), before, value))
        assert beyond_rounding(log_probs(engine, ids), expected, "float32", again)

import math
from decimal import Decimal

import numpy as np
import pytest
import torch

from hybridrl.rewards.score import Score, ScoringRequest, score_request, to_score

ANSWER = ScoringRequest("gsm8k", "#### 42", "42", {})


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (1, 1.0),
        (0.0, 0.0),
        (-0.5, -0.5),
        (True, 1.0),
        (np.float32(0.25), 0.25),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (Decimal("0.5"), 0.5),
        ([0.5, "because"], 0.5),
        ((1, 2), 1.0),
    ],
)
def test_a_number_is_the_score_and_is_recorded_as_acc(returned, value):
    assert to_score(returned) == Score(value, {"acc": value})


def test_arrays_and_tensors_of_several_numbers_become_lists():
    values = {"array": np.array([[0.5, 1.0], [2.0, 3.0]]), "long": np.arange(2000), "tensor": torch.tensor([1.5, 2.5])}
    extras = to_score({"score": 1.0, **values}).extras
    assert extras["array"] == [[0.5, 1.0], [2.0, 3.0]] and extras["tensor"] == [1.5, 2.5]
    assert extras["long"] == list(range(2000))


def test_all_keys_of_a_dict_are_kept_and_made_plain():
    class Verdict:
        def __str__(self) -> str:
            return "right"

    numbers = {"score": np.float32(0.5), "parts": (np.int64(1),)}
    score = to_score({**numbers, "acc": True, "pred": "42", "why": Verdict(), 7: None})
    assert score.value == 0.5
    plain = {"score": 0.5, "parts": [1.0]}
    assert score.extras == {**plain, "acc": True, "pred": "42", "why": "right", "7": None}
    assert type(score.extras["score"]) is float


def test_an_integer_that_no_float_holds_is_kept_as_hexadecimal_text():
    score = to_score({"score": 1, "held": 2**1022, "beyond": -(2**1023)})
    assert (score.extras["held"], score.extras["beyond"]) == (2**1022, hex(-(2**1023)))


@pytest.mark.parametrize(
    ("returned", "fault"),
    [
        (None, "none"),
        ({"score": None}, "none"),
        ([None], "none"),
        (math.nan, "nan"),
        (-math.inf, "nan"),
        (-2e18, "nan"),  # whose square is infinite in float32
        ({"score": np.float64("nan")}, "nan"),
        ("1.0", "type"),
        (b"1", "type"),
        ({"acc": 1.0}, "type"),
        ({"score": "1"}, "type"),
        ([], "type"),
        (1j, "type"),
        (np.array([0.5, 1.0]), "type"),
        (object(), "type"),
    ],
)
def test_what_is_no_finite_number_is_a_fault_and_no_score(returned, fault):
    score = to_score(returned)
    assert (score.value, score.extras, score.fault) == (None, {}, fault)
    assert score.detail


def test_an_exception_is_a_fault_that_names_its_place():
    def reward(answer: ScoringRequest) -> float:
        raise KeyError("unit")

    score = score_request(reward, ANSWER)
    assert (score.value, score.fault) == (None, "raised:KeyError")
    assert score.detail.startswith("KeyError: 'unit' (") and "test_score.py:" in score.detail


def test_a_returned_object_that_fails_on_use_is_a_fault_too():
    class Trap:
        def __float__(self) -> float:
            raise RuntimeError("not now")

    assert score_request(lambda answer: to_score(Trap()), ANSWER).fault == "raised:RuntimeError"

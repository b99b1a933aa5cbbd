import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.rewards.overlong import OverlongPenalty
from hybridrl.rewards.score import Score

PENALTY = OverlongPenalty(max_length=20, buffer=8, factor=0.5, log=True)
RIGHT = Score(1.0, {"score": 1.0, "acc": True})


def dapo(length: int, longest: int, buffer: int) -> float:
    """The soft overlong punishment as DAPO writes it, by cases."""
    if length <= longest - buffer:
        return 0.0
    return ((longest - buffer) - length) / buffer if length <= longest else -1.0


@pytest.mark.parametrize(("length", "reward"), [(1, 0.0), (12, 0.0), (13, -0.0625), (16, -0.25), (20, -0.5)])
def test_from_the_buffer_on_the_score_falls_by_a_straight_line(length, reward):
    shaped = PENALTY.shaped(RIGHT, length)
    assert shaped.value == 1.0 + reward
    assert shaped.extras["overlong_reward"] == reward
    assert shaped.extras["overlong"] is (reward < 0)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.floats(0, 4))
def test_it_is_the_papers_formula_times_the_factor(length, buffer, beyond, factor):
    longest = buffer + beyond
    length = min(length, longest)
    value = OverlongPenalty(longest, buffer, factor, log=False).shaped(Score(0.0), length).value
    assert value == pytest.approx(factor * dapo(length, longest, buffer), abs=1e-12)


def test_what_the_grader_said_stays_and_its_score_is_not_changed_in_place():
    given = Score(1.0, {"score": 1.0, "acc": True})
    shaped = PENALTY.shaped(given, 20)
    assert (shaped.extras["score"], shaped.extras["acc"]) == (1.0, True)
    assert given == RIGHT


def test_a_penalty_that_is_not_logged_adds_no_extras():
    assert OverlongPenalty(20, 8, 0.5, log=False).shaped(RIGHT, 20).extras == RIGHT.extras


def test_a_score_without_value_is_left_alone():
    fault = Score(None, fault="timeout", detail="no score within 60 s")
    assert PENALTY.shaped(fault, 20) is fault

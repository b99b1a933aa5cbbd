import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.rewards.score import OverlongPenalty, Score, Shaping

PENALTY = Shaping(overlong=OverlongPenalty(max_length=20, buffer=8, factor=0.5, log=True))
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
    penalty = OverlongPenalty(longest, buffer, factor, log=False)
    assert penalty.of(length) == pytest.approx(factor * dapo(length, longest, buffer), abs=1e-12)


def test_what_the_scorer_said_stays_and_its_score_is_not_changed_in_place():
    given = Score(1.0, {"score": 1.0, "acc": True})
    shaped = PENALTY.shaped(given, 20)
    assert (shaped.extras["score"], shaped.extras["acc"]) == (1.0, True)
    assert given == RIGHT


def test_a_penalty_that_is_not_logged_adds_no_extras():
    assert Shaping(overlong=OverlongPenalty(20, 8, 0.5, log=False)).shaped(RIGHT, 20).extras == RIGHT.extras


def test_a_score_without_value_or_without_settings_stays_as_it_is():
    fault = Score(None, fault="timeout", detail="no score within 60 s")
    assert PENALTY.shaped(fault, 20) is fault
    assert Shaping().shaped(RIGHT, 20) == RIGHT


def test_scores_are_scaled_then_clipped_then_penalised():
    shaping = Shaping(2.0, (-1.0, 1.5), OverlongPenalty(20, 8, 0.5, log=False))
    assert shaping.shaped(Score(1.0), 20).value == 1.5 - 0.5
    assert shaping.shaped(Score(-1.0), 20).value == -1.0 - 0.5


def test_whether_a_score_was_clipped_is_told():
    shaping = Shaping(clip=(0.0, 1.0))
    assert [shaping.shaped(Score(value), 3).extras for value in (0.5, 2.0)] == [{"clipped": False}, {"clipped": True}]


@given(st.lists(st.floats(-2, 2), min_size=1), st.floats(0.1, 4), st.integers(1, 20))
def test_token_rewards_always_add_up_to_the_score(rewards, scale, length):
    shaping = Shaping(scale, (-1.0, 1.0), OverlongPenalty(20, 8, 0.5, log=True))
    shaped = shaping.shaped(Score(sum(rewards), token_rewards=rewards), length)
    assert sum(shaped.token_rewards) == pytest.approx(shaped.value, abs=1e-9)
    assert shaped.token_rewards[:-1] == [scale * reward for reward in rewards[:-1]]

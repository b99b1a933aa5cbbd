"""Countdown, multiple choice, search questions."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.rewards.scorers import countdown, multiple_choice, search_qa

TASK = {"target": 24, "numbers": [1, 2, 3, 4]}


@pytest.mark.parametrize(
    ("equation", "score"),
    [
        ("1 * 2 * 3 * 4", 1.0),
        ("(1 + 3) * (2 + 4) = 24", 1.0),
        ("4 * 3 * 2 / 1", 1.0),
        ("24", 0.1),
        ("1 * 2 * 3 * 4 * 1", 0.1),
        ("1 + 2 + 3 + 4", 0.1),
        ("12 * 34", 0.1),
        ("4 ** 3 - 2 - 1", 0.0),
        ("1 / (3 - 3)", 0.0),
        ("1 // 2", 0.0),
        ("__import__('os').system('id')", 0.0),
        ("one plus two", 0.0),
        ("1 +", 0.0),
        ("", 0.0),
    ],
)
def test_countdown_wants_the_target_from_every_number_once(equation, score):
    assert countdown.compute_score(f"<think>hm</think><answer>{equation}</answer>", TASK) == score


def test_countdown_wants_its_tags_and_takes_options():
    assert countdown.compute_score("1 * 2 * 3 * 4", TASK) == 0.0
    assert countdown.compute_score("<answer>24</answer>", TASK, format_score=0.0) == 0.0
    assert countdown.compute_score("<answer>1*2*3*4</answer>", TASK, score=2.0) == 2.0


def test_countdown_is_exact():
    assert countdown.evaluate("1 / 3 + 1 / 3 + 1 / 3") == 1
    assert countdown.evaluate("-(2 - 3)") == 1


EQUATIONS = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda parts: f"({' '.join(parts)})"),
    max_leaves=8,
)


@given(EQUATIONS)
def test_countdown_computes_what_python_does(equation):
    value = countdown.evaluate(equation)
    assert value == Fraction(eval(equation)) if len(equation) <= 200 else value is None


@given(st.text(alphabet="0123456789+-*/() .=_eE", max_size=250))
def test_countdown_survives_every_text(equation):
    countdown.evaluate(equation)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (r"so \boxed{B}", "B"),
        (r"\boxed{\text{(C)}}", "C"),
        ("<answer>d. because</answer>", "D"),
        ("The answer is (A).", "A"),
        ("Answer: b", "B"),
        ("option A is wrong, so the answer is **C**", "C"),
        ("I think\nB.", "B"),
        (r"the answer is A, no, \boxed{B}", "B"),
        ("A man walks", ""),
        (r"\boxed{42}", ""),
        ("<answer>Apples</answer>", ""),
        ("", ""),
    ],
)
def test_the_letter_that_an_answer_settles_on(text, letter):
    assert multiple_choice.chosen_letter(text) == letter


@pytest.mark.parametrize(("truth", "score"), [("B", 1.0), ("(b)", 1.0), (1, 1.0), ("A", 0.0), (0, 0.0)])
def test_the_right_choice_is_a_letter_or_its_place(truth, score):
    found = multiple_choice.compute_score(r"\boxed{B}", truth)
    assert found == {"score": score, "acc": score, "pred": "B"}


def test_no_letter_is_no_right_choice():
    assert multiple_choice.compute_score("", "")["score"] == 0.0


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<answer>The Beatles!</answer>", 1.0),
        ("<answer>beatles</answer>", 1.0),
        ("<answer>Stones</answer> <answer>Fab Four</answer>", 1.0),
        ("<answer>the beatles band</answer>", 0.1),
        ("Beatles", 0.0),
        ("<answer>Beatles</answer>" * 11, 0.25),
    ],
)
def test_search_answers_match_but_for_case_articles_and_punctuation(text, score):
    truth = {"target": ["Beatles", "the Fab Four"]}
    assert search_qa.compute_score(text, truth, format_score=0.1) == score


@pytest.mark.parametrize("truth", ["Paris", ["Paris"], {"target": "Paris"}, {"target": ["Lyon", "Paris"]}])
def test_search_answers_take_every_form_of_ground_truth(truth):
    assert search_qa.compute_score("<answer>paris</answer>", truth) == 1.0

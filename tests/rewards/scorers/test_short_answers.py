"""Countdown, multiple choice, search questions."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.rewards.scorers import short_answers

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
    assert short_answers.score_countdown(f"<think>hm</think><answer>{equation}</answer>", TASK) == score


def test_countdown_wants_its_tags_and_takes_options():
    assert short_answers.score_countdown("1 * 2 * 3 * 4", TASK) == 0.0
    assert short_answers.score_countdown("<answer>24</answer>", TASK, format_score=0.0) == 0.0
    assert short_answers.score_countdown("<answer>1*2*3*4</answer>", TASK, score=2.0) == 2.0


def test_countdown_is_exact():
    assert short_answers.equation_value("1 / 3 + 1 / 3 + 1 / 3") == 1
    assert short_answers.equation_value("-(2 - 3)") == 1


EQUATIONS = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda parts: f"({' '.join(parts)})"),
    max_leaves=8,
)


@given(EQUATIONS)
def test_countdown_computes_what_python_does(equation):
    value = short_answers.equation_value(equation)
    assert value == Fraction(eval(equation)) if len(equation) <= 200 else value is None


@given(st.text(alphabet="0123456789+-*/() .=_eE", max_size=250))
def test_countdown_survives_every_text(equation):
    short_answers.equation_value(equation)


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
def test_the_letter_that_a_response_chooses(text, letter):
    assert short_answers.chosen_letter(text) == letter


@pytest.mark.parametrize(("truth", "score"), [("B", 1.0), ("(b)", 1.0), (1, 1.0), ("A", 0.0), (0, 0.0)])
def test_the_right_choice_is_a_letter_or_its_place(truth, score):
    score_dict = short_answers.score_multiple_choice(r"\boxed{B}", truth)
    assert score_dict == {"score": score, "acc": score, "pred": "B"}


def test_no_letter_is_no_right_choice():
    assert short_answers.score_multiple_choice("", "")["score"] == 0.0


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
def test_search_responses_match_but_for_case_articles_and_punctuation(text, score):
    truth = {"target": ["Beatles", "the Fab Four"]}
    assert short_answers.score_search_qa(text, truth, format_score=0.1) == score


@pytest.mark.parametrize("truth", ["Paris", ["Paris"], {"target": "Paris"}, {"target": ["Lyon", "Paris"]}])
def test_search_responses_take_every_form_of_ground_truth(truth):
    assert short_answers.score_search_qa("<answer>paris</answer>", truth) == 1.0

"""verl's graders under their own signatures. Where texts are compared, the expected values were computed by verl; what
verl compares symbolically may be correct here and incorrect there."""

import pytest

from hybridrl.compat.verl import graders

TESTS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
PROGRAM = "a, b = map(int, input().split())\nprint(a + b)"


@pytest.mark.parametrize(
    ("text", "last", "inner", "math", "math_inner"),
    [
        (r"so \boxed{42}.", r"\boxed{42}", "42", r"\boxed{42}", "42"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", r"\boxed{\frac{1}{2}}", None),
        (r"\boxed{1} and \boxed{2", None, None, None, None),
        (r"$\boxed 4$ it is", None, None, r"\boxed 4", "4"),
        (r"\fbox{3}", None, None, r"\fbox{3}", "AssertionError"),
        ("42", None, None, None, None),
    ],
)
def test_boxes_are_found_and_opened_as_in_verl(text, last, inner, math, math_inner):
    assert (graders.last_box(text), graders.math_box(text)) == (last, math)
    if last is not None:
        assert graders.unboxed(last) == inner
    if math_inner == "AssertionError":
        with pytest.raises(AssertionError):
            graders.math_unboxed(math)
    elif math_inner is not None:
        assert graders.math_unboxed(math) == math_inner


def test_what_is_no_box_cannot_be_opened():
    with pytest.raises(AssertionError):
        graders.unboxed("42")


MINERVA = [
    ("x = 5", "5"),
    ("an apple", "apple"),
    ("$1,234$", "1234"),
    (r"\text{Tuesday}", "Tuesday"),
    (r"5\text{ cm}^2", "5"),
    (r"2500 dollars", "2500"),
    (r"\boxed{7}", "7"),
    (r"\frac12", r"\frac{1}{2}"),
    (r"\sqrt3", r"\sqrt{3}"),
    (r"1{,}000", "1000"),
    (r"90^\circ", "90"),
    (r"50\%", r"50\%"),
    ("so $4$ it is", "4"),
    ("", ""),
]
MATH = [
    (r"\dfrac12", r"\frac{1}{2}"),
    ("1/2", r"\frac{1}{2}"),
    ("0.5", r"\frac{1}{2}"),
    (".5", r"\frac{1}{2}"),
    ("01/2", "01/2"),
    ("a/2", "a/2"),
    (r"\frac1{72}", r"\frac{1}{72}"),
    ("x = 5", "5"),
    ("abc = 5", "abc=5"),
    (r"5\text{ cm}", "5"),
    (r"\$18.90", "18.90"),
    (r"\left(1, 2\right)", "(1,2)"),
    ("1,000", "1,000"),
]


@pytest.mark.parametrize(
    ("spell", "result", "spelling"),
    [*((graders.minerva_spelling, *case) for case in MINERVA), *((graders.math_spelling, *case) for case in MATH)],
)
def test_results_are_spelled_as_minerva_and_math_do(spell, result, spelling):
    assert spell(result) == spelling


@pytest.mark.parametrize(
    ("text", "strict", "score", "right", "result"),
    [
        ("Answer: 42", False, 1.0, True, "42"),
        ("Answer: 41", False, -1.0, False, "41"),
        (r"so \boxed{42}", False, 1.0, True, "42"),
        ("42", False, -1.0, False, "[INVALID]"),
        (r"Answer: 41 \boxed{42}", True, 1.0, True, "42"),
        ("Answer: 42", True, -1.0, False, None),
        (r"\boxed{42}" + " " * 100, True, -1.0, False, None),
    ],
)
def test_dapo_returns_what_verls_does(text, strict, score, right, result):
    assert graders.dapo_score(text, "42", strict) == {"score": score, "acc": right, "pred": result}


@pytest.mark.parametrize(
    ("data_source", "solution", "truth", "returned"),
    [
        ("openai/gsm8k", "#### 1,000", "1000", 1.0),
        ("openai/gsm8k", "#### 42" + " " * 300, "42", 0.0),
        ("lighteval/MATH", r"\boxed{\dfrac12}", "0.5", 1.0),
        ("math_dapo", "Answer: 1", "1", {"score": 1.0, "acc": True, "pred": "1"}),
        ("numina_cn_k12", r"so \(\frac{1}{2}\)", "0.5", 1.0),
        ("hiyouga/geometry3k", r"<think>x</think>\boxed{3}", "3", 1.0),
        ("hiyouga/geometry3k", r"\boxed{3}", "3", 0.9),
        ("searchR1_nq", "<answer>The Seine</answer>", {"target": ["seine"]}, 1.0),
        ("codecontests", f"```python\n{PROGRAM}\n```", TESTS, 1.0),
    ],
)
def test_the_default_scorer_returns_verls_types(data_source, solution, truth, returned):
    score = graders.default_compute_score(data_source, solution, truth, {}, memory_limit_mb=512)
    assert score == returned and type(score) is type(returned)


def test_data_without_a_scorer_raise_what_verl_raises():
    with pytest.raises(NotImplementedError, match="data_source poems"):
        graders.default_compute_score("poems", "", "")


def test_programs_run_in_the_sandbox_under_each_of_verls_names():
    half = "print(3)"
    assert graders.code_score(f"```python\n{PROGRAM}\n```", TESTS)[0] is True
    assert graders.code_score(f"```python\n{half}\n```", TESTS, continuous=True)[0] == 0.5
    assert graders.sandbox_score("http://unused", None, 512, f"```python\n{half}\n```", TESTS)[0] == 0.5
    assert graders.run_test(TESTS, test=half, timeout=5)[0] == [True, False]
    assert graders.check_correctness(TESTS, PROGRAM, timeout=5)[0] == [True, True]


def test_the_other_signatures_return_what_verls_do():
    assert graders.math_scores(["a", "b"], [r"\boxed{1}", "1"], ["1", "1"], [{}, {}]) == [1.0, 0.0]
    assert graders.symbolic_score(r"\boxed{1/2}", "0.5") == 1.0
    assert graders.prime_score(r"Step 2: \boxed{1/2}", "0.5") == (True, True, "1/2")
    assert (graders.grade_answer("1/2", "0.5"), graders.grade_answer(None, "1")) == (True, False)
    tagged = "<answer>the river Seine</answer>"
    assert graders.search_score(tagged, {"target": "seine"}, "strict", 0.1) == 0.1
    assert graders.search_part_score(tagged, {"target": "seine"}, "strict", 0.1) == 1.0
    assert graders.gsm8k_number("from 3 to 4.", "flexible") == "4."
    assert (graders.exact_match("The Seine", "seine"), graders.part_match("the river Seine", ["Seine"])) == (1, 1)

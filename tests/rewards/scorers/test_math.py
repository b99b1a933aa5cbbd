import pytest

from hybridrl.config import ConfigError
from hybridrl.rewards import load as scorers
from hybridrl.rewards.scorers.math import compute_dapo_score as dapo_score
from hybridrl.rewards.scorers.math import compute_score, is_equal

# Where math-verify's own tests want another verdict than the flexible scorer gives, by the answer's end.
EXPLAINED = {
    "2,74 $ a..": "a decimal comma",
    "1.22": "a decimal comma in the ground truth 1,22",
    "1000,99": "a decimal comma",
    "is $10,455$. I hope it is correct.": "dollars of money read as those of LaTeX",
    r"\le x \\le 7$": "the option that takes a relation for a set is off here",
    "$(0.6,2.6667]$": "the option that compares by two digits is off here",
    r"\boxed{(1, 1)}$$": "boxes with a sentence between them are not one result",
    r"$\boxed{1,2}$": "boxes with a sentence between them, in the ground truth",
    r"\boxed{3(x + 2)^2 - 2} \) ": "boxes with a sentence between them",
    "$f(y)$": "the option under which names of variables do not matter is off here",
    r"$1 + \frac{1}{\mathrm{e}}$": "it is another number than the ground truth 1 - 1/e",
}


def apart_from(rows: list[dict], method: str) -> list[dict]:
    """The rows whose verdict here is another one than expected."""
    verdicts = [compute_score(row["prediction"], row["ground_truth"], method)["acc"] == 1 for row in rows]
    return [row for row, right in zip(rows, verdicts, strict=True) if right != row["expected"]]


def test_agrees_with_every_graded_model_output(graded):
    rows = graded("math_model_outputs.jsonl")
    assert len(rows) == 464
    assert apart_from(rows, "strict") == []


def test_every_other_verdict_than_that_of_math_verifys_own_tests_is_explained(graded):
    rows = graded("math_verify.jsonl")
    texts = [row["prediction"] for row in apart_from(rows, "flexible")]
    assert len(rows) == 132
    assert [next((end for end in EXPLAINED if text.endswith(end)), text) for text in texts] == list(EXPLAINED)


def test_every_other_verdict_than_that_of_other_frameworks_is_explained(graded):
    styles = {
        *("gsm8k", "geometry3k", "aime_boxed_or_answer", "grade_answer_mathd", "grade_answer_sympy"),
        *("nemo_math_env", "verl_is_equiv", "verl_symbolic_equal", "accuracy_reward", "math_dapo"),
    }
    rows = [row for row in graded("framework_tests.jsonl") if row["style"] in styles]
    assert len(rows) == 43
    assert {row["prediction"]: row["style"] for row in apart_from(rows, "flexible")} == {
        r"Answer: \boxed{0.5}": "aime_boxed_or_answer",  # compares texts; it is the same number as 1/2
        r"\frac{2}{4}": "grade_answer_sympy",  # wants fractions reduced; it is the same number as 1/2
    }


def test_the_order_of_a_list_without_brackets_does_not_matter(graded):
    rows = graded("hendrycks_math.jsonl")
    apart = [row for row in rows if is_equal(row["prediction"], row["ground_truth"]) != row["expected"]]
    assert [row["prediction"] for row in apart] == ["10, 4, -2", "0.1, 4, 2"]


@pytest.mark.parametrize(
    ("result", "truth"),
    [
        ("42", "42"),
        ("042", "42"),
        ("+7", "7"),
        (r"\frac{1}{2}", "0.5"),
        (r"\dfrac12", r"\frac{1}{2}"),
        ("x = 4", "4"),
        (r"17 \bmod 5 = 2", "2"),
        (r"28\%", "28"),
        ("28 percent", r"28\%"),
        ("(x-2)(x+2)", "x^2 - 4"),
        (r"\{1, 2\}", r"\{2, 1\}"),
        ("33", r"\boxed{033}"),
        (r"\text{Tuesday}", "Tuesday"),
        (r"1{,}000", "1000"),
        ("12", 12),
    ],
)
def test_equal_results_are_right(result, truth):
    assert compute_score(f"so \\boxed{{{result}}}", truth) == {"score": 1.0, "acc": 1.0, "pred": result}


@pytest.mark.parametrize(
    ("result", "truth"),
    [
        ("41", "42"),
        ("", "42"),
        ("", ""),
        (r"\frac{64}{400}", r"\frac{63}{400}"),
        ("(1, 2)", "(2, 1)"),
        ("x", "y"),
        (r"x \mod 5 >= 2", "2"),
    ],
)
def test_other_results_are_wrong(result, truth):
    assert compute_score(f"so \\boxed{{{result}}}", truth)["score"] == 0.0


def test_strictly_a_response_without_a_box_is_wrong_and_flexibly_its_end_is_read():
    texts = ["The answer is $\\frac{1}{2}$.", "it is 0.5.", "2, then 1/2", "of 7 it is\n\\frac12", "none"]
    assert [compute_score(text, "1/2")["score"] for text in texts] == [0.0] * 5
    assert [compute_score(text, "1/2", method="flexible")["score"] for text in texts] == [1.0, 1.0, 1.0, 1.0, 0.0]


def test_a_method_that_there_is_not_is_rejected():
    with pytest.raises(ConfigError, match=r"reward_kwargs\.method=lenient: .* strict or flexible"):
        compute_score("", "", method="lenient")


@pytest.mark.parametrize(
    ("text", "score", "pred"),
    [
        ("Answer: 42", 1.0, "42"),
        ("Answer: $42$.", 1.0, "42"),
        ("Answer: \\boxed{42}", 1.0, "42"),
        ("so \\boxed{42}", 1.0, "42"),
        ("\\boxed{42}\nAnswer: 41", -1.0, "41"),
        ("42", -1.0, ""),
        ("", -1.0, ""),
    ],
)
def test_dapo_reads_the_line_that_says_answer_and_takes_a_point_for_a_wrong_one(text, score, pred):
    assert dapo_score(text, "42") == {"score": score, "acc": float(score > 0), "pred": pred}


def test_dapo_strictly_reads_a_box_alone():
    texts = ["Answer: 42", "\\boxed{42}\nAnswer: 41"]
    assert [dapo_score(text, "42", strict_box_verify=True)["score"] for text in texts] == [-1.0, 1.0]


@pytest.mark.parametrize(
    ("response", "score", "acc"),
    [
        ("<think>half</think> \\boxed{\\frac{1}{2}}", 1.0, 1.0),
        ("\\boxed{0.5}", 0.9, 1.0),
        ("<think>half</think> \\boxed{3}", 0.1, 0.0),
        ("<think>half</think> 1/2", 0.0, 0.0),
    ],
)
def test_geometry_pays_for_the_value_in_the_box_and_a_little_for_the_form(response, score, acc):
    result = scorers.compute_score("hiyouga/geometry3k", response, r"\frac{1}{2}")
    assert (result["score"], result["acc"]) == (pytest.approx(score), acc)


def test_of_several_truths_any_may_be_met():
    assert compute_score("so \\boxed{0.5}", ["\\frac12", "half"])["score"] == 1
    assert compute_score("so \\boxed{0.5}", ["\\boxed{3}", "\\frac12"])["score"] == 1
    assert compute_score("so \\boxed{0.5}", ["3", "4"])["score"] == 0

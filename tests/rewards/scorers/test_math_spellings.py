r"""One value in many spellings: delimiters, money, units, percent, degrees, thousands, sets, intervals, bases.

Each group was tried in all these sentences with verl's math_reward, math_dapo, prime_math and math_verify: whatever
one of them calls right is right here, but for contents that are wrong. Those are a set for a pair, another base,
"5 million" and "5 or 6" for 5 (read as units, or for the first of them), another bracket of an interval, and in
prime_math, which allows percent and a ten-thousandth, 1890 for 18.90 and 32349 for 32348.
"""

import itertools

import pytest

from hybridrl.rewards.scorers.math import compute_dapo_score as dapo_score
from hybridrl.rewards.scorers.math import compute_score, without_units

SENTENCES = (
    r"Therefore, the answer is \(%s\).",
    "Therefore,\n\\[\n%s\n\\]",
    r"\[ x = %s \]",
    "The answer is $%s$.",
    "So\n$$%s$$",
    "The answer is %s.",
    "Steps.\nAnswer: %s",
    r"so \( \boxed{%s} \).",
)
# Truths that are the same, what is equal to them, and what is not.
GROUPS = {
    "money": (
        ["18.90", r"\$18.90", "$18.90", r"\$18.9"],
        ["18.90", r"\$18.90", "18.9", r"\$ 18.90", "$18.90"],
        ["18.91", r"\$19", "1890"],
    ),
    "thousands": (
        ["32,348", r"\$32,\!348", "32348", r"32{,}348"],
        ["32348", "32,348", r"\$32,348", r"32,\!348", r"32{,}348", r"32\,348"],
        ["32349", "32, 349", "32"],
    ),
    "units": (
        ["5", r"5\text{ cm}", "5 cm", r"5\,\text{cm}", r"5\text{ cm}^2"],
        ["5", r"5\text{ cm}", "5 cm", r"5\,\text{cm}", r"5\ \text{cm}", r"5\mathrm{~cm}", "5 square feet"],
        ["6", r"50\text{ cm}", r"5\text{ million}", "5 thousand", r"5 \text{ or } 6"],
    ),
    "words": (["2500 dollars", r"2500\text{ dollars}", "2500"], ["2,500", r"\$2{,}500", "2500 dollars"], ["250"]),
    "powers": (
        ["5000000", r"5\text{ million}"],
        ["5 million", "5,000,000", r"\$5\text{ million}"],
        ["5", "5 thousand"],
    ),
    "degrees": (["90", r"90^\circ", r"90 \text{ degrees}"], ["90", r"90^{\circ}", "90 degrees", r"90\degree"], ["91"]),
    "percent": (["50", r"50\%", "50%"], ["50", r"50\%", "50%", "50 percent"], ["51", r"5\%"]),
    "fractions": (
        [r"\frac{1}{2}", "1/2", "0.5", r"\frac12"],
        [r"\frac{1}{2}", "1/2", ".5", r"\dfrac12", r"\tfrac{1}{2}"],
        [r"\frac{1}{3}", "2"],
    ),
    "negative": (["-3", "$-3$", r"\boxed{-3}"], ["-3", "x = -3", "-3.0"], ["3", "-4"]),
    "pairs": (
        ["(1,2)", r"\left(1,2\right)"],
        ["(1,2)", "(1, 2)", r"\left( 1, 2 \right)"],
        ["(2,1)", r"\{1,2\}", "[1,2]", "(1,2]"],
    ),
    "sets": (
        [r"\{1,2\}", r"\left\{1,2\right\}"],
        [r"\{1,2\}", r"\{2, 1\}", r"\lbrace 1, 2 \rbrace"],
        ["(1,2)", "[1,2]", r"\{1,3\}"],
    ),
    "intervals": (["[0,1)", r"\left[0,1\right)"], ["[0,1)", r"\left[0, 1\right)"], ["(0,1)", "[0,1]", "(0,1]"]),
    "unbounded": ([r"(-\infty, 3]"], [r"(-\infty,3]", r"\left(-\infty, 3\right]"], [r"(-\infty,3)", r"(-\infty,4]"]),
    "bases": (["4210_5", "4210_{5}"], ["4210_5", "4210_{5}"], ["4211_5", "4210_6"]),
    "roots": ([r"3\sqrt{2}"], [r"3\sqrt{2}", r"3 \sqrt2"], [r"2\sqrt{3}"]),
    "polynomials": (["x^2+1"], ["x^2 + 1", "1+x^{2}"], ["x^2-1"]),
    "words alone": ([r"\text{Tuesday}", "Tuesday"], ["Tuesday", r"\text{Tuesday}"], [r"\text{Monday}"]),
    "choices": ([r"\text{(C)}", "C"], [r"\text{(C)}", "C", r"\text{C}"], ["B", r"\text{(D)}"]),
}


def verdicts(group: str, kind: int) -> list[tuple[str, str]]:
    """Return truths and results of a group with an unexpected verdict; kind 1: correct, 2: incorrect."""
    truths, contents = GROUPS[group][0], GROUPS[group][kind]
    sentences = itertools.cycle(SENTENCES)
    tried = [(truth, next(sentences) % content) for truth in truths for content in contents for _ in range(3)]
    tried += [(truth, f"\\boxed{{{content}}}") for truth in truths for content in contents]
    expected = float(kind == 1)
    return [pair for pair in tried if compute_score(pair[1], pair[0], "flexible")["score"] != expected]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("kind", [1, 2], ids=["right", "wrong"])
def test_spellings_of_the_truth_are_right_and_other_values_wrong_in_every_sentence(group: str, kind: int) -> None:
    assert not verdicts(group, kind)


@pytest.mark.parametrize(
    "text",
    [
        "**Final Answer:**\n\\boxed{42}",
        "### Final Answer:\n\n\\[\n\\boxed{42}\n\\]",
        "Final Answer:\n$$\n\\boxed{42}\n$$",
        "Final Answer: as follows:\n\n$\\boxed{42}$",
        "Answer: $42$",
        "Answer: 42 units",
    ],
)
def test_dapo_finds_the_result_that_is_announced(text: str) -> None:
    assert dapo_score(text, "42")["score"] == 1


@pytest.mark.parametrize("piece", ["$", "\\$", "\\(", "5 ", "1,", "\\text{ cm}", "(1,", "ab ", "^", "answer: ", "= "])
def test_texts_made_to_be_slow_are_read_within_the_limit(piece: str) -> None:
    """The kernel ends a response that needs more than three seconds; a result has 500 characters."""
    without_units("5" + piece * (500 // len(piece)))
    assert compute_score(piece * 20_000, "\\frac{1}{7}", "flexible")["score"] == 0

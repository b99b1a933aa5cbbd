"""Whatever a model writes, every built-in scorer gives it a number, in time, and runs none of it."""

import math
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridrl.doctor.reward import reward_config
from hybridrl.rewards.load import CPU_SECONDS
from hybridrl.rewards.pool import ScorerPool
from hybridrl.rewards.score import Score, ScoringRequest

TRUTHS = {
    "gsm8k": "42",
    "lighteval/MATH": "\\frac{1}{2}",
    "math_dapo": "42",
    "hiyouga/geometry3k": "42",
    "countdown": {"target": 24, "numbers": [1, 2, 3, 4]},
    "multiple_choice": "B",
    "searchR1_nq": {"target": ["Paris"]},
}
FORMS = ("{}", "\\boxed{{{}}}", "#### {}", "Answer: {}", "<answer>{}</answer>", "```python\n{}\n```")

# Slow or large where computed, deep where parsed.
SLOW = [
    "10^{10^{10}}",
    "(x+y+z)^{300}",
    "\\int_0^1 x^{x^x} dx",
    "1+" * 249 + "1",
    "{" * 249 + "}" * 249,
    "\\frac{" * 60 + "1" + "}{2}" * 60,
]
# Long where searched, code where it is run, numbers that are none.
NASTY = [
    *(character * 1_000_000 for character in "{} %9($"),
    "\\boxed{" * 150_000,
    "<answer>" * 100_000,
    "Answer:" * 100_000,
    "\x00" * 1000,
    "\ud800",
    "\u0661\u0662 \u202e \U0001f4a9 e\u0301" * 100,
    "__import__('os').system('touch /tmp/hybridrl_was_here')",
    "exec('import os; os._exit(0)')",
    "\\text{__import__('os')._exit(0)}",
    "x.__class__.__mro__",
    "lambda: 0",
    "nan",
    "inf",
    "1e999999999",
    "0/0",
    "\\frac{1}{0}",
    "\\infty - \\infty",
]


@pytest.fixture(scope="module")
def pool() -> Iterator[ScorerPool]:
    with ScorerPool(reward_config(None, ["reward.num_workers=2", "reward.timeout=120"]), None, TRUTHS) as pool:
        yield pool


def scored(pool: ScorerPool, texts: list[str]) -> list[Score]:
    answers = [ScoringRequest(name, text, truth, {}) for text in texts for name, truth in TRUTHS.items()]
    return [future.result(timeout=300) for future in pool.submit(answers)]


def assert_all_are_numbers(scores: list[Score]) -> None:
    assert all(score.fault is None and math.isfinite(score.value) for score in scores), scores


def test_results_that_are_slow_to_compute_or_deep_are_wrong_responses(pool):
    answers = [ScoringRequest("lighteval/MATH", f"\\boxed{{{result}}}", "\\frac{1}{2}", {}) for result in SLOW]
    scores = [future.result(timeout=300) for future in pool.submit(answers)]
    assert_all_are_numbers(scores)
    assert [score.value for score in scores] == [0.0] * len(SLOW)


@pytest.mark.parametrize("nasty", NASTY, ids=lambda text: ascii(text[:20]))
def test_nothing_that_is_long_or_code_does_more_than_count_as_a_wrong_response(pool, nasty):
    scores = scored(pool, [form.format(nasty) for form in FORMS])
    assert_all_are_numbers(scores)
    assert all(score.value <= 0.1 for score in scores)
    assert not any("CPU time" in score.detail for score in scores)


def test_a_response_that_takes_too_long_to_score_counts_as_an_empty_one_and_the_next_is_scored(pool):
    slow, right = (ScoringRequest("math_dapo", f"\\boxed{{{text}}}", "42", {}) for text in ("x+10^{10^{10}}", "42"))
    slow, right = (future.result(timeout=60) for future in pool.submit([slow, right]))
    assert (slow.value, slow.fault, slow.extras["pred"]) == (-1.0, None, "")
    assert f"{CPU_SECONDS} s of CPU time" in slow.detail
    assert (right.value, right.detail) == (1.0, "")


PIECES = st.sampled_from(
    [
        *("\\frac", "\\sqrt", "\\boxed{", "\\text{", "\\begin{pmatrix}", "\\end{pmatrix}", "\\le", "\\pi", "\\sum"),
        *("\\infty", "\\\\", "x", "42", *"{}()[]^_=,$&!%+-/01 "),
    ]
)


@given(st.one_of(st.text(max_size=60), st.lists(PIECES, max_size=12).map("".join)), st.sampled_from(FORMS))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_text_is_given_a_number(pool, text, form):
    assert_all_are_numbers(scored(pool, [form.format(text)]))

import time

import pytest

from hybridrl.rewards.scorers.short_answers import last_answer_line, last_boxed, last_tagged


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} is wrong, so \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\fbox {7}", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{3}}", r"\boxed{3}"),
        (r"{ stray \boxed{4}", "4"),
        (r"\boxed{5} and then \boxed{6", "5"),
        (r"$\boxed{1}$ and $\boxed{2}$", "1, 2"),
        (r"\[ \boxed{x = 1} \quad \text{and} \quad \boxed{y = 2} \]", "x = 1, y = 2"),
        (r"\boxed{1}, which we double: \boxed{2}", "2"),
        (r"\boxed{}", ""),
        (r"so $\boxed 4$.", "4"),
        (r"\boxed 5, so \boxed{6}", "6"),
        ("42", None),
        ("", None),
    ],
)
def test_the_last_boxes_that_close_are_the_result(text, content):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<answer>1</answer> no, <answer> 2 </answer>", "2"),
        ("<answer>\n1\n2</answer> and <answer>3", "1\n2"),
        ("<answer><answer>4</answer>", "4"),
        ("1</answer>", None),
        ("<answer>", None),
    ],
)
def test_the_last_tag_that_closes_is_the_result(text, content):
    assert last_tagged(text) == content


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("Answer: 1\nAnswer: 2 apples \nbye", "2 apples"),
        ("the ANSWER :\n 3", "3"),
        ("**Answer:** 4", "4"),
        ("**Final Answer:**\n\n$$\n\\boxed{6}\n$$", "\\boxed{6}"),
        ("Final Answer:\n\\[\n\\boxed{7}\n\\]", "\\boxed{7}"),
        ("Final Answer: it is as follows:\n\\boxed{8}", "8"),
        ("Answer: \u221e", "\u221e"),
        ("Answer: ", None),
        ("the answer is 5", None),
    ],
)
def test_what_follows_the_last_response_mark_is_the_result(text, content):
    assert last_answer_line(text) == content


@pytest.mark.parametrize("read", [last_boxed, last_tagged, last_answer_line])
def test_texts_made_to_be_slow_are_read_at_once(read):
    began = time.monotonic()
    pieces = (
        "\\boxed{",
        "{",
        "}",
        "\\",
        "\\boxed",
        "\\boxed{1} and ",
        "<answer>",
        "</answer>",
        "answer ",
        " ",
        "answer:",
    )
    for piece in pieces:
        read(piece * 100_000)
    assert time.monotonic() - began < 5

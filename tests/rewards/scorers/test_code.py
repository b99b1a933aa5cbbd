import json

import pytest

from hybridrl.rewards.scorers.code import compute_score, last_program, same_output, same_value

SUMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
ADD = "a, b = map(int, input().split())\nprint(a + b)"


def acc(program: str, truth: object) -> float:
    return compute_score(f"```python\n{program}\n```", truth)["acc"]


@pytest.mark.parametrize("truth", [SUMS, json.dumps(SUMS)])
def test_a_program_that_prints_what_is_wanted_is_right(truth):
    assert compute_score(f"Like this:\n```python\n{ADD}\n```", truth) == {"score": 1.0, "acc": 1.0, "passed": 1.0}


def test_the_score_is_the_share_of_tests_or_all_or_nothing():
    half = "```python\nprint(3)\n```"
    assert compute_score(half, SUMS) == {"score": 0.5, "acc": 0.0, "passed": 0.5}
    assert compute_score(half, SUMS, continuous=False) == {"score": 0.0, "acc": 0.0, "passed": 0.5}


@pytest.mark.parametrize("response", ["", "  \n", "```python\n```", "```python\n\n"])
def test_a_response_without_a_program_passes_no_test_also_where_nothing_is_to_be_printed(response):
    nothing = {"inputs": ["", ""], "outputs": ["", "3"]}
    assert compute_score(response, nothing) == {"score": 0.0, "acc": 0.0, "passed": 0.0}
    assert acc("print()", {"inputs": [""], "outputs": [""]}) == 1.0
    with pytest.raises(ValueError, match="2 inputs and 1 outputs"):  # a wrong truth is named whatever the response
        compute_score(response, {"inputs": ["", ""], "outputs": [""]})


def test_a_program_that_loops_or_crashes_is_a_wrong_response():
    for program in ("while True: pass", "import os; os.abort()", "def"):
        assert compute_score(program, SUMS, seconds=0.5)["score"] == 0.0


@pytest.mark.parametrize(
    "truth",
    [
        "assert f(1) == 2\nassert f(2) == 3",
        ["assert f(1) == 2", "assert f(2) == 3"],
        '["assert f(1) == 2"]',
        {"test_list": ["assert f(1) == 2"]},
        {"functional": "def check():\n    assert f(1) == 2\ncheck()"},
        {"test": "def check(candidate):\n    assert candidate(1) == 2", "entry_point": "f"},
        {"fn_name": "f", "inputs": [[1], [2]], "outputs": [2, [3]]},
        {"fn_name": "f", "inputs": ["1"], "outputs": ["2"]},
    ],
)
def test_asserts_and_calls_are_read_in_every_form(truth):
    assert acc("def f(x): return x + 1", truth) == 1.0
    assert acc("def f(x): return x", truth) == 0.0


@pytest.mark.parametrize("truth", [{}, {"inputs": [], "outputs": []}, {"inputs": ["1"], "outputs": []}, None, 42])
def test_a_ground_truth_without_tests_is_the_scorers_fault(truth):
    with pytest.raises(ValueError, match="the ground truth h"):
        compute_score(ADD, truth)


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```\nor\n```python\nb\n```", "b\n"),
        ("```py\na\n``` done", "a\n"),
        ("```\na\n```", "a\n"),
        ("```python\na", "a"),
        ("a", "a"),
    ],
)
def test_the_last_fenced_block_is_the_program(text, program):
    assert last_program(text) == program


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 2\n3", "1 2\n3\n", True),
        ("1  2 3", "1 2\n3", True),
        ("0.5000001", "0.5", True),
        ("0.51", "0.5", False),
        ("1000000007", "1000000008", False),
        ("1.0", "1", True),
        ("yes", "YES", False),
        ("1 2", "1", False),
        ("nan", "nan", True),
        ("1.x", "1.5", False),
    ],
)
def test_outputs_are_compared_word_by_word(printed, expected, same):
    assert same_output(printed, expected) is same


@pytest.mark.parametrize(
    ("returned", "expected", "same"),
    [
        ("2", 2, True),
        ("2", [2], True),
        ("[1]", [1], True),
        ('"x"', "x", True),
        ("[1, 2]", "[1, 2]", True),
        ("2", 3, False),
        ("0.30000000000000004", 0.3, True),
        ("0.30000000000000004", [0.3], True),
        ('{"a": [1, 0.30000000000000004]}', {"a": [1, 0.3]}, True),
        ("3.0", 3, True),
        ("0.31", 0.3, False),
        ("1000001", 1000000, False),  # integers are exact
        ("1" + "0" * 400, 0.5, False),
        ("[0.3, 1]", [0.3], False),
        ('{"a": 0.3}', {"b": 0.3}, False),
        ("no JSON", "no JSON?", False),
        ("[" * 100_000, [1], False),
    ],
)
def test_returned_values_are_compared_as_json(returned, expected, same):
    assert same_value(returned, expected) is same

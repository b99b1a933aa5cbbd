import time

import pytest

from hybridrl.rewards import load
from hybridrl.rewards.scorers.short_answers import score_gsm8k as compute_score

STRICT = [
    ("2 + 40 = 42\n#### 42", "42", 1.0),
    ("#### -3", "-3", 1.0),
    ("#### 1,234", "1234", 1.0),
    ("#### 1234", "$1,234", 1.0),
    ("#### 308.", "308", 1.0),
    ("#### 0.5", "0.5", 1.0),
    ("#### 7, or rather\n#### 42", "42", 1.0),
    ("#### 42, or rather\n#### 7", "42", 0.0),
    ("#### 42" + ", which concludes it" * 100, "42", 1.0),
    ("#### 42", 42, 1.0),
    ("#### 18.00", "18", 0.0),
    ("####42", "42", 0.0),
    ("the answer is 42", "42", 0.0),
    ("#### ...", "42", 0.0),
    ("", "42", 0.0),
]
FLEXIBLE = [
    ("so 3 and 4 make 7", "7", 1.0),
    ("it is $1,875.", "1875", 1.0),
    ("it is 42, as said, and so on ...", "42", 1.0),
    ("5-3", "-3", 1.0),
    (".5", ".5", 1.0),
    ("42 or 7", "42", 0.0),
    ("no number. none, at all", "42", 0.0),
]


@pytest.mark.parametrize(
    ("options", "answer", "truth", "score"),
    [*(({}, *case) for case in STRICT), *(({"method": "flexible"}, *case) for case in FLEXIBLE)],
)
def test_strict_takes_the_last_number_after_the_marker_and_flexible_anywhere(options, answer, truth, score):
    assert compute_score(answer, truth, **options) == score


def test_a_wrong_number_earns_the_format_score_and_a_missing_one_nothing():
    options = {"format_score": 0.1, "score": 2.0}
    answers = ["#### 42", "#### 41", "42"]
    assert [compute_score(answer, "42", **options) for answer in answers] == [2.0, 0.1, 0.0]


@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_responses_made_to_be_slow_are_scored_at_once(method):
    started = time.monotonic()
    for piece in (".", ",", "-", "1", "#", "#### ", "#### -."):
        compute_score(piece * 100_000, "42", method=method)
    assert time.monotonic() - started < 2


def test_agrees_with_every_graded_model_output(graded):
    rows = [row for row in graded("gsm8k_model_outputs.jsonl") if row["style"] == "gsm8k_A_colon"]
    verdicts = [compute_score(row["prediction"], row["ground_truth"], "flexible") == 1.0 for row in rows]
    assert len(rows) == 2640
    assert verdicts == [row["expected"] for row in rows]


def test_agrees_with_the_cases_of_other_frameworks(graded):
    options = {"gsm8k_hash_strict": {"method": "strict"}, "gsm8k_flexible": {"method": "flexible"}}
    rows = [row for row in graded("framework_tests.jsonl") if row["style"] in {*options, "verl_compute_score"}]
    assert len(rows) == 12
    for row in rows:
        given = options.get(row["style"]) or row["options"]
        right = compute_score(row["prediction"], row["ground_truth"], **given) == 1.0
        assert right == row["expected"], row


def test_what_a_tool_said_earns_nothing():
    read = "#### 522\nSearch result: the answer is #### 4242."
    assert load.compute_score("openai/gsm8k", read, "4242") == 1.0
    assert load.compute_score("openai/gsm8k", read, "4242", {"written": "#### 522"}) == 0.0
    assert load.compute_score("openai/gsm8k", read, "4242", {"written": "#### 522\n#### 4242"}) == 1.0


@pytest.mark.parametrize(("response", "score"), [("so #### 1,072", 1.0), ("#### 24", 0.0), ("1072", 0.0)])
def test_a_whole_solution_of_the_dataset_is_a_ground_truth(response: str, score: float) -> None:
    assert compute_score(response, "48/2 = <<48/2=24>>24 in May.\n48+1024 = 1072 clips altogether.\n#### 1072") == score

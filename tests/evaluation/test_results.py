"""The numbers of an evaluation, worked out by hand for a few questions."""

import json

import pytest

from hybridrl.evaluation.results import (
    comparisons,
    corrected,
    dataset_results,
    metrics,
    selection_biases,
    write_results,
)
from hybridrl.evaluation.samples import GREEDY, Sample
from hybridrl.evaluation.tables import columns, compared_rows, markdown, rich_table, rows


def samples(answers: dict[str, str], dataset: str = "maths", **more: object) -> list[Sample]:
    """Samples from texts such as `{"q1": "1101"}`: right, right, wrong, right; `x` is a fault."""
    made = []
    for identity, text in answers.items():
        for number, letter in enumerate(text):
            score, fault = (None, "timeout") if letter == "x" else (float(letter), None)
            fields = {"dataset": dataset, "id": identity, "sample": number, "seed": 0, "prompt": "", "response": ""}
            fields |= {"truth": "1", "tokens": 10 + number, "finish": "completed", "score": score, "fault": fault}
            made.append(Sample(**fields | {"key": f"{dataset}{identity}{number}"} | more))
    return made


def test_the_numbers_of_three_questions():
    results = dataset_results(samples({"a": "1111", "b": "1100", "c": "0000"}))
    assert (results["num_questions"], results["n"], results["samples"], results["sample_length"]) == (3, 4, 12, 11.5)
    assert results["avg"]["value"] == 0.5 and results["score"] == 0.5
    # Of 4 with 2 right, a pair has a right one in 5 of 6 cases, and both right in 1 of 6.
    assert results["pass@k"]["2"]["value"] == pytest.approx((1 + 5 / 6 + 0) / 3)
    assert results["pass^k"]["2"]["value"] == pytest.approx((1 + 1 / 6 + 0) / 3)
    assert results["pass@k"]["4"]["value"] == pytest.approx(2 / 3)
    assert results["maj@k"] == {} and results["greedy_acc"] is None and results["faults"] == 0


def test_a_majority_needs_predictions():
    some = samples({"a": "10", "b": "11"}, pred="7")
    assert dataset_results(some)["maj@k"]["2"]["value"] == pytest.approx((0.5 + 1) / 2)


def test_faults_are_left_out_and_bounded():
    results = dataset_results(samples({"a": "11x0", "b": "0000", "c": "xxxx"}))
    assert (results["faults"], results["excluded_questions"], results["num_questions"]) == (5, 1, 3)
    assert results["avg"]["value"] == pytest.approx((2 / 3 + 0) / 2)
    assert results["fault_bounds"] == pytest.approx(((2 / 4 + 0 + 0) / 3, (3 / 4 + 0 + 1) / 3))
    assert results["pass@k"]["4"]["value"] == 0.0  # of the one question that has four samples


def test_the_greedy_response_counts_by_itself():
    greedy = [Sample("maths", "a", GREEDY, 0, "", "", "1", 99, "max_tokens", 1.0)]
    results = dataset_results(greedy + samples({"a": "00"}))
    assert (results["greedy_acc"]["value"], results["greedy_length"]) == (1.0, 99.0)
    assert (results["avg"]["value"], results["sample_length"], results["truncated"]) == (0.0, 10.5, 0)


def test_truncated_responses_are_counted():
    assert dataset_results(samples({"a": "10"}, finish="max_tokens"))["truncated"] == 2


def test_only_faults_give_no_mean_and_still_a_table():
    results = {"maths": dataset_results(samples({"a": "xx"}))}
    assert results["maths"]["avg"] is None
    assert rows(results, columns(results))[0][:6] == ["maths", "1", "-", "10.5", "-", "-"]


def test_the_table_begins_with_areals_columns():
    results = {"maths": dataset_results(samples({"a": "1" * 16, "b": "10" * 8}, pred="1"))}
    names = columns(results)
    assert names[:6] == ["dataset", "num_questions", "greedy_length", "sample_length", "greedy_acc", "sample_pass@1"]
    assert names[6:] == ["again", "alike", "pass@8", "pass@16", "maj@8", "truncated", "faults"]
    assert rows(results, names)[0][5] == "0.7500 (n too small)"
    assert markdown(names, rows(results, names)).count("\n") == 3


def test_a_score_that_is_not_right_or_wrong_is_called_a_mean_score():
    results = {"maths": dataset_results(samples({"a": "10"}, score=0.3))}
    assert rows(results, columns(results))[0][5] == "0.3000 (mean score)"


def test_a_table_that_is_too_wide_for_the_terminal_is_turned():
    results = {"maths": dataset_results(samples({"a": "10"}))}
    names = columns(results)
    tables = [rich_table("", names, rows(results, names), width) for width in (200, 60)]
    assert [table.row_count for table in tables] == [1, len(names) - 1]


def test_metrics_have_names_for_trackers_and_verls():
    flat = metrics({"maths": dataset_results(samples({"a": "1100"}, pred="1"))})
    assert flat["eval/maths/avg@4"] == flat["val-core/maths/acc/mean@4"] == 0.5
    assert {"eval/maths/pass@2", "eval/maths/pass^4", "eval/maths/maj@4"} <= flat.keys()


def test_results_and_questions_are_written(tmp_path):
    some = samples({"a": "10", "b": "11"}) + samples({"a": "0"}, "history")
    write_results(tmp_path, some, {"model": {"name": "m"}}, [])
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["model"] == {"name": "m"} and written["datasets"]["maths"]["avg"]["value"] == 0.75
    questions = [json.loads(line) for line in (tmp_path / "questions.jsonl").read_text().splitlines()]
    assert [(one["dataset"], one["id"], one["n"], one["correct"]) for one in questions] == [
        ("maths", "a", 2, 1),
        ("maths", "b", 2, 2),
        ("history", "a", 1, 0),
    ]


def test_a_comparison_is_over_shared_questions_and_names_the_largest_changes():
    a, b = samples({"x": "11", "y": "00", "z": "10"}), samples({"y": "11", "x": "11", "w": "11"})
    compared = comparisons(a, b)["maths"]
    assert (compared["num_questions"], compared["only_a"], compared["only_b"]) == (2, 1, 1)
    assert (compared["a"], compared["b"], compared["difference"]) == (0.5, 1.0, 0.5)
    assert compared["largest"] == [("y", 0.0, 1.0)]
    assert compared_rows({"maths": compared})[0][:4] == ["maths", "0.5000", "1.0000", "+0.5000"]


def test_datasets_without_a_question_in_common_are_said_to_have_none():
    compared = comparisons(samples({"x": "1"}), samples({"y": "1"}))
    assert "no question in common" in compared_rows(compared)[0][0]


def test_p_values_are_corrected_for_the_number_of_comparisons():
    a = samples({str(index): "0000" for index in range(8)})
    b = samples({str(index): "1111" for index in range(8)})
    compared = [comparisons(a, b), comparisons(a, a)]
    corrected(compared)
    assert compared[0]["maths"]["p"] == pytest.approx(2 / 2**8)
    assert compared[0]["maths"]["p_holm"] == pytest.approx(4 / 2**8)


def test_only_several_evaluations_have_a_selection_bias():
    some = samples({"a": "10", "b": "10"})
    assert selection_biases([some]) == {} and selection_biases([some, some])["maths"] > 0

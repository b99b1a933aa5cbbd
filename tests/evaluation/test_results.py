"""The numbers of an evaluation, worked out by hand for a few questions."""

import json
from pathlib import Path

import pyarrow.parquet
import pytest

from hybridrl.config import ConfigError
from hybridrl.data.prompts import Prompt
from hybridrl.evaluation.plan import Question
from hybridrl.evaluation.results import (
    comparisons,
    corrected,
    dataset_results,
    read_results,
    reject_nothing_in_common,
    selection_biases,
    write_results,
)
from hybridrl.evaluation.samples import GREEDY, Sample
from hybridrl.evaluation.scoring import write_responses
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
    without_vote = samples({"a": "11"}, pred="7") + samples({"b": "11"})
    assert dataset_results(without_vote)["maj@k"]["2"]["value"] == 0.5


def test_faults_are_left_out_and_bounded_where_a_score_is_right_or_wrong():
    half = samples({"a": "10"}, score=0.3) + samples({"b": "xx"})
    assert dataset_results(half)["fault_bounds"] is None
    results = dataset_results(samples({"a": "11x0", "b": "0000", "c": "xxxx"}))
    assert (results["faults"], results["excluded_questions"], results["num_questions"]) == (5, 1, 3)
    assert results["avg"]["value"] == pytest.approx((2 / 3 + 0) / 2)
    assert results["fault_bounds"] == pytest.approx(((2 / 4 + 0 + 0) / 3, (3 / 4 + 0 + 1) / 3))
    assert results["pass@k"]["4"]["value"] == 0.0  # of the one question that has four samples


def test_the_greedy_response_counts_by_itself_and_truncated_ones_are_those_that_were_sampled():
    greedy = [Sample("maths", "a", GREEDY, 0, "", "", "1", 99, "max_tokens", 1.0)]
    results = dataset_results(greedy + samples({"a": "00"}))
    assert (results["greedy_acc"]["value"], results["greedy_length"]) == (1.0, 99.0)
    assert (results["avg"]["value"], results["sample_length"], results["truncated"]) == (0.0, 10.5, 0)
    assert dataset_results(samples({"a": "10"}, finish="max_tokens"))["truncated"] == 2


def test_only_faults_give_no_mean_and_still_a_table():
    results = {"maths": dataset_results(samples({"a": "xx"}))}
    assert results["maths"]["avg"] is None
    assert rows(results, columns(results))[0][:6] == ["maths", "1", "-", "10.5", "-", "-"]


def test_the_table_begins_with_areals_columns():
    results = {"maths": dataset_results(samples({"a": "1" * 16, "b": "10" * 8}, pred="1"))}
    names = columns(results)
    assert names[:6] == ["dataset", "num_questions", "greedy_length", "sample_length", "greedy_acc", "sample_pass@1"]
    assert names[6:] == [
        "this benchmark again",
        "questions like these",
        "pass@8",
        "pass@16",
        "maj@8",
        "truncated",
        "faults",
    ]
    assert rows(results, names)[0][5] == "0.7500 (n too small)"
    assert markdown(names, rows(results, names)).count("\n") == 3


def test_a_score_that_is_not_right_or_wrong_is_called_a_mean_score():
    results = {"maths": dataset_results(samples({"a": "10"}, score=0.3))}
    assert rows(results, columns(results))[0][5] == "0.3000 (mean score) (n too small)"


def test_a_table_that_is_too_wide_for_the_terminal_is_turned():
    results = {"maths": dataset_results(samples({"a": "10"}))}
    names = columns(results)
    tables = [rich_table("", names, rows(results, names), width) for width in (200, 60)]
    assert [table.row_count for table in tables] == [1, len(names) - 1]


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
    assert compared_rows({"maths": compared})[0][:4] == ["maths", "0.5000", "1.0000", "+0.5000 (n too small)"]


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


def test_questions_with_the_same_id_and_another_prompt_are_not_compared():
    a, b = samples({"x": "1", "y": "1"}, prompt="1+1="), samples({"x": "1"}, prompt="1+1=")
    compared = comparisons(a, b + samples({"y": "0"}, prompt="2+2="))["maths"]
    assert (compared["num_questions"], compared["other_prompt"], compared["only_a"]) == (1, 1, 0)
    assert comparisons(a, samples({"x": "1"}))["maths"]["num_questions"] == 1  # stored responses without prompts


@pytest.mark.parametrize(
    ("dataset", "prompt", "message"),
    [
        ("maths", "2+2=", "1 have the same dataset and id, and other prompts"),
        ("history", "1+1=", r"datasets there: history; here: maths"),
    ],
)
def test_an_evaluation_without_the_same_questions_is_rejected(dataset, prompt, message):
    question = Question(0, "maths", "x", Prompt(0, [], "1+1=", "maths", "2", {}))
    reject_nothing_in_common([question], samples({"x": "1"}, prompt="1+1="), "eval.compare=dir")
    with pytest.raises(ConfigError, match=f"eval.compare=dir: no question in common.*{message}"):
        reject_nothing_in_common([question], samples({"x": "1"}, dataset, prompt=prompt), "eval.compare=dir")


def stored(place: Path, some: list[Sample]) -> None:
    place.joinpath("samples.jsonl").write_text("".join(json.dumps(vars(one)) + "\n" for one in some))


def test_results_are_read_with_their_samples_and_no_others(tmp_path):
    some = samples({"a": "10", "b": "11"})
    stored(tmp_path, some + samples({"c": "1"}))
    write_results(tmp_path, some, {"model": {"name": "m"}}, [])
    results, read = read_results(tmp_path, "eval.compare=x")
    assert read == some and results["model"]["name"] == "m"


def test_results_that_are_not_complete_are_rejected(tmp_path):
    def rejection() -> str:
        with pytest.raises(ConfigError) as error:
            read_results(tmp_path, "eval.compare=x")
        return str(error.value)

    some = samples({"a": "10"})
    stored(tmp_path, some[:1])
    assert "interrupted: it has no results.json" in rejection()
    write_results(tmp_path, some, {"model": {"name": "m"}}, [])
    assert "samples.jsonl lacks 1 of the 2 samples" in rejection()
    (tmp_path / "results.json").write_text('{"datasets": {}}')
    assert "do not say which samples they are of" in rejection()


def test_at_temperature_0_the_samples_are_the_greedy_ones():
    results = dataset_results(samples({"a": "1", "b": "0"}), all_greedy=True)
    assert (results["greedy_acc"]["value"], results["greedy_length"]) == (0.5, 10.0)


def test_every_k_that_is_set_is_shown():
    results = {"maths": dataset_results(samples({"a": "1" * 8}, pred="1"), [2, 3, 8])}
    names = columns(results, [2, 3, 8])
    assert [name for name in names if "@" in name][1:] == ["pass@2", "pass@3", "pass@8", "maj@2", "maj@3", "maj@8"]


def test_responses_are_written_with_the_columns_of_their_rows(tmp_path):
    rows = [{"question": str(n), "level": level, "empty": {}} for n, level in ((1, 3), (2, "hard"), (3, 4))]
    questions = [
        Question(index, "maths", str(index), Prompt(index, [], row["question"], "maths", truth, {}, row))
        for index, (row, truth) in enumerate(zip(rows, ["1", 2, None], strict=True))
    ]
    write_responses(tmp_path, questions, samples({"0": "10", "1": "1", "2": "1"}, response="4"))
    read = pyarrow.parquet.read_table(tmp_path / "responses.parquet").to_pylist()
    assert [one["responses"] for one in read] == [["4", "4"], ["4"], ["4"]]
    assert [(one["question"], one["level"]) for one in read] == [("1", "3"), ("2", '"hard"'), ("3", "4")]
    assert [one["reward_model"]["ground_truth"] for one in read] == ["1", "2", None]

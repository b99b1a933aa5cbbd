"""Benchmarks become rows from files in their usual forms, and missing ones are explained."""

import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from hybridrl.rewards.load import compute_score
from tests.scripts import run_script

SCRIPT = Path(__file__).parents[2] / "recipes" / "eval" / "make_data.py"


def make(place: Path, *names: str) -> int | str | None:
    return run_script(SCRIPT, "--source", place, "--out", place / "out", *names)


def rows(place: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (place / "out" / f"{name}.jsonl").read_text().rstrip("\n").split("\n")]


def score(row: dict, response: str) -> float:
    return compute_score(row["data_source"], response, row["reward_model"]["ground_truth"])["acc"]


def test_problems_in_every_format_are_scored_by_the_built_in_reward(tmp_path):
    (tmp_path / "AIME_2024.jsonl").write_text(json.dumps({"Problem": "Find x.", "Answer": "025"}) + "\n")
    (tmp_path / "aime2025.json").write_text(json.dumps([{"question": "Find y.", "answer": 7}]))
    table = pa.table({"problem": ["Find z."], "answer": [142.0]})
    pyarrow.parquet.write_table(table, tmp_path / "amc-2023.parquet")
    (tmp_path / "MATH-500.csv").write_text('problem,answer\n"Find, w.",\\frac{1}{2}\n')
    assert make(tmp_path) == 0
    for name, answer in {"aime24": "25", "aime25": "7", "amc": "142", "math500": "\\frac{1}{2}"}.items():
        (row,) = rows(tmp_path, name)
        assert row["prompt"][0]["content"].startswith("Find")
        assert score(row, f"So \\boxed{{{answer}}}.") == 1.0 and score(row, "So \\boxed{13}.") == 0.0


def test_the_choices_of_gpqa_are_in_a_seeded_order(tmp_path):
    with (tmp_path / "gpqa_diamond.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["Question", "Correct Answer", *(f"Incorrect Answer {n}" for n in (1, 2, 3))])
        writer.writerows([[f"Which?\nRow {n}", "right", "w1", "w2", "w3"] for n in range(8)])
    assert make(tmp_path, "gpqa") == 0
    first = rows(tmp_path, "gpqa")
    letters = [row["reward_model"]["ground_truth"] for row in first]
    assert len(set(letters)) > 1 and make(tmp_path, "gpqa") == 0 and rows(tmp_path, "gpqa") == first
    for row, letter in zip(first, letters, strict=True):
        assert f"{letter}. right" in row["prompt"][0]["content"]
        assert score(row, f"\\boxed{{{letter}}}") == 1.0


def test_a_missing_file_is_named_with_what_it_must_hold(tmp_path, capsys):
    assert make(tmp_path, "aime24") == 1
    printed = capsys.readouterr().out
    assert "aime24: no file" in printed and "columns problem, answer" in printed and "HuggingFaceH4" in printed


def test_a_row_without_an_answer_is_named_with_its_columns(tmp_path):
    (tmp_path / "amc.jsonl").write_text(json.dumps({"problem": "Find x.", "solution": "25"}) + "\n")
    assert "amc.jsonl, row 1: there is no column answer" in str(make(tmp_path, "amc"))


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "amc.jsonl has no rows"), ('["Find x."]', "amc.jsonl, row 1: 'Find x.' is not an object with columns")],
)
def test_a_file_without_rows_of_columns_is_named(tmp_path, text, message):
    (tmp_path / "amc.jsonl").write_text(text)
    assert message in str(make(tmp_path, "amc"))


def test_texts_may_hold_any_line_end_of_unicode(tmp_path):
    text = "Find\u2028x\x85."
    (tmp_path / "amc.jsonl").write_text(json.dumps({"problem": text, "answer": 1}, ensure_ascii=False) + "\n")
    (tmp_path / "aime24.csv").write_text(f'problem,answer\n"{text}",1\n')
    assert make(tmp_path, "amc", "aime24") == 0
    assert all(rows(tmp_path, name)[0]["prompt"][0]["content"].startswith(text) for name in ("amc", "aime24"))


def test_datasets_in_the_layout_of_the_hub_are_named_by_their_folder(tmp_path):
    folder = tmp_path / "aime_2024" / "data"
    folder.mkdir(parents=True)
    for number, split in enumerate(("train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001")):
        (folder / f"{split}.jsonl").write_text(json.dumps({"problem": "Find x.", "answer": number}) + "\n")
    assert make(tmp_path, "aime24") == 0
    assert [row["reward_model"]["ground_truth"] for row in rows(tmp_path, "aime24")] == ["0", "1"]


def test_a_name_within_a_word_is_another_benchmark(tmp_path, capsys):
    for name in ("dynamic_camc", "amcs"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"problem": "Find x.", "answer": 1}) + "\n")
    assert make(tmp_path, "amc") == 1
    (tmp_path / "AMC23.jsonl").write_text(json.dumps({"problem": "Find x.", "answer": 1}) + "\n")
    assert make(tmp_path, "amc") == 0

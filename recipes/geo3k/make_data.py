"""Questions about pictures as rows for reinforcement learning, in the form of verl's geo3k: train and test.parquet.

Reads a file of questions, a row each with `file`, `question` and `answer`, and the pictures that it names:

    {"file": "triangle.png", "question": "Find x.", "answer": "\\frac{3}{2}"}
"""

import argparse
import csv
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SOURCE = "hiyouga/geometry3k"
COLUMNS = ("file", "question", "answer")
PLACE = "<image>"
INSTRUCTION = "Think first, between <think> and </think>, then write the final answer in \\boxed{}."
TEST_EVERY = 10  # the first of ten questions is one to validate with


def read_questions(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of JSON lines, or of a CSV file with a header."""
    with path.open(encoding="utf-8", newline="") as lines:
        yield from csv.DictReader(lines) if path.suffix == ".csv" else map(json.loads, filter(str.strip, lines))


def prompt_row(question: Mapping[str, Any], pictures: Path, index: int, split: str) -> dict[str, Any]:
    """Return a row; `file` may be a list. Pictures whose places the question does not name come first."""
    files = question["file"] if isinstance(question["file"], list) else [question["file"]]
    text, answer = str(question["question"]), str(question["answer"])
    places = PLACE * len(files) if PLACE not in text else ""
    return {
        "data_source": SOURCE,
        "prompt": [{"role": "user", "content": f"{places}{text} {INSTRUCTION}"}],
        "images": [{"bytes": (pictures / file).read_bytes(), "path": None} for file in files],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, "question": text, "answer": answer},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Make train.parquet and test.parquet of questions about pictures.")
    parser.add_argument("--questions", type=Path, required=True, help="file of JSON lines, or a CSV file")
    parser.add_argument("--pictures", type=Path, required=True, help="directory of the files that it names")
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    arguments = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    for number, question in enumerate(read_questions(arguments.questions)):
        split = "train" if number % TEST_EVERY else "test"
        if absent := [column for column in COLUMNS if not question.get(column)]:
            sys.exit(f"{arguments.questions}: question {number + 1} has no {', '.join(absent)}")
        try:
            rows[split].append(prompt_row(question, arguments.pictures, len(rows[split]), split))
        except OSError as error:
            sys.exit(f"{arguments.questions}: question {number + 1}: {error.filename}: {error.strerror}")
    if not rows["train"]:
        sys.exit(f"{arguments.questions}: two questions are needed, one to train on and one to validate with")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for split, of_split in rows.items():
        pq.write_table(pa.Table.from_pylist(of_split), arguments.out / f"{split}.parquet")
        print(f"{arguments.out / split}.parquet: {len(of_split)} rows")


if __name__ == "__main__":
    main()

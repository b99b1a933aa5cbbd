"""Rows for `hybridrl eval` from files of benchmarks that you have: AIME 2024 and 2025, AMC, MATH-500, and GPQA.

    python recipes/eval/make_data.py --source DIR --out outputs/eval/data [aime24 math500 ...]

Reads .jsonl, .json, .csv and .parquet with the usual columns, and says which file is missing and what it must hold.
"""

import argparse
import csv
import io
import json
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
PROBLEMS = ("problem", "question", "prompt", "query")  # columns, in any case
ANSWERS = ("answer", "expected_answer", "ground_truth", "final_answer", "correct answer")
WRONG = ("incorrect answer 1", "incorrect answer 2", "incorrect answer 3")
BOXED = "Reason step by step, and put the final answer in \\boxed{}."
LETTER = "Reason step by step, and put the letter of the right choice in \\boxed{}."

Row = dict[str, Any]


class BadRow(Exception):
    """A row lacks what its benchmark needs."""


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: names that its file may have, the data source that selects the built-in reward, how a row becomes a
    question and its truth, and what to do if there is no file."""

    names: tuple[str, ...]
    data_source: str
    convert: Callable[[Row, int], tuple[str, str]]
    columns: str
    public: str


def solved(row: Row, index: int) -> tuple[str, str]:
    """Return a problem with its instruction, and its answer."""
    return f"{_column(row, PROBLEMS)}\n\n{BOXED}", _number(str(_column(row, ANSWERS)))


def chosen(row: Row, index: int) -> tuple[str, str]:
    """Return a question with its choices in a seeded order, and the letter of the right one."""
    right = str(_column(row, ANSWERS))
    choices = [right, *(str(_column(row, (name,))) for name in WRONG)]
    random.Random(f"choices {index}").shuffle(choices)
    listed = "\n".join(f"{letter}. {choice.strip()}" for letter, choice in zip("ABCD", choices, strict=True))
    return f"{_column(row, PROBLEMS)}\n\n{listed}\n\n{LETTER}", "ABCD"[choices.index(right)]


SOLVED, CHOICES = "problem, answer", "Question, Correct Answer, Incorrect Answer 1, 2 and 3"
BENCHMARKS = {
    "aime24": Benchmark(("aime24", "aime2024"), "aime24", solved, SOLVED, "HuggingFaceH4/aime_2024"),
    "aime25": Benchmark(("aime25", "aime2025"), "aime25", solved, SOLVED, "math-ai/aime25"),
    "amc": Benchmark(("amc",), "amc", solved, SOLVED, "AI-MO/aimo-validation-amc"),
    "math500": Benchmark(("math500",), "HuggingFaceH4/MATH-500", solved, SOLVED, "HuggingFaceH4/MATH-500"),
    "gpqa": Benchmark(("gpqadiamond", "gpqa"), "multiple_choice", chosen, CHOICES, "Idavidrein/gpqa"),
}


def find(directory: Path, benchmark: Benchmark) -> list[Path]:
    """Return the files of a benchmark in a directory: the first that has one of its names, else those in a folder that
    has, of one split (`aime_2024/data/train-00000-of-00002.parquet`)."""
    files = sorted(path for path in directory.rglob("*") if path.suffix.lower() in SUFFIXES)
    for name in benchmark.names:
        if named := next((path for path in files if is_named(path.stem, name)), None):
            return [named]
        folders = [path for path in files if any(is_named(one, name) for one in path.relative_to(directory).parts[:-1])]
        if folders:
            first = folders[0]
            return [path for path in folders if (path.parent, split(path)) == (first.parent, split(first))]
    return []


def is_named(text: str, name: str) -> bool:
    """Whether a name is in a text as a word of its own, in any case and with any signs between its characters."""
    end = "[0-9]" if name[-1].isdigit() else "[a-z]"
    return bool(re.search(rf"(?<![a-z0-9]){r'[^a-z0-9]*'.join(name)}(?!{end})", text.lower()))


def split(path: Path) -> tuple[str, str]:
    """Return what files of one split of a dataset of the hub have in common."""
    return re.sub(r"-\d+-of-\d+.*", "", path.stem), path.suffix


def read(path: Path) -> list[Row]:
    """Return the rows of a file, with column names in lower case. Raises BadRow."""
    suffix = path.suffix.lower()
    text = "" if suffix == ".parquet" else path.read_text(encoding="utf-8-sig")
    if suffix == ".parquet":
        rows = pyarrow.parquet.read_table(path).to_pylist()
    elif suffix == ".csv":
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
    elif text.lstrip().startswith("["):
        rows = json.loads(text)
    else:
        rows = [json.loads(line) for line in text.split("\n") if line.strip()]  # JSON texts may hold other line ends
    if not rows:
        raise BadRow(f"{path} has no rows")
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise BadRow(f"{path}, row {index + 1}: {row!r:.60} is not an object with columns")
    return [{str(name).strip().lower(): value for name, value in row.items()} for row in rows]


def make(name: str, paths: list[Path]) -> list[Row]:
    """Return the rows of a benchmark for an evaluation. Raises BadRow."""
    benchmark, made = BENCHMARKS[name], []
    rows = [(f"{path}, row {number}", row) for path in paths for number, row in enumerate(read(path), 1)]
    for index, (place, row) in enumerate(rows):
        try:
            question, truth = benchmark.convert(row, index)
        except BadRow as error:
            raise BadRow(f"{place}: {error}; it has {', '.join(row)}") from error
        made.append(
            {
                "id": f"{name}-{index}",
                "data_source": benchmark.data_source,
                "prompt": [{"role": "user", "content": question}],
                "reward_model": {"style": "rule", "ground_truth": truth},
                "extra_info": {"index": index},
            }
        )
    return made


def _column(row: Row, names: tuple[str, ...]) -> Any:
    found = next((row[name] for name in names if row.get(name) not in (None, "")), None)
    if found is None:
        raise BadRow(f"there is no column {' or '.join(names)}")
    return found


def _number(answer: str) -> str:
    """Return an answer as the reward compares it: whole numbers without leading zeros and without .0."""
    return str(int(float(answer))) if re.fullmatch(r"\d+(\.0+)?", answer.strip()) else answer.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="directory of the files that you have")
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    parser.add_argument("benchmarks", nargs="*", metavar="NAME", help=f"{', '.join(BENCHMARKS)}; default: all found")
    options = parser.parse_args()
    if unknown := [name for name in options.benchmarks if name not in BENCHMARKS]:
        parser.error(f"{unknown[0]}: choose from {', '.join(BENCHMARKS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    missing, made = [], []
    for name in options.benchmarks or BENCHMARKS:
        benchmark, paths = BENCHMARKS[name], find(options.source, BENCHMARKS[name])
        if not paths:
            missing.append(name)
            print(
                f"{name}: no file with this name in {options.source}. Make {name}.jsonl, .csv or .parquet there with "
                f"the columns {benchmark.columns}; public as {benchmark.public} on the Hugging Face hub"
            )
            continue
        try:
            rows = make(name, paths)
        except (BadRow, ValueError) as error:
            sys.exit(f"{name}: {error}")
        file = options.out / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        made.append(str(file))
        print(f"{file}: {len(rows)} questions from {', '.join(map(str, paths))}")
    if made:
        print(
            f"\nhybridrl eval eval.models=[MODEL] eval.files=[{','.join(made)}] eval.preset=deepseek eval.greedy=true"
        )
    sys.exit(1 if (options.benchmarks and missing) or not made else 0)


if __name__ == "__main__":
    main()

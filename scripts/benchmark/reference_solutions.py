"""Score the reference solutions of HumanEval and MBPP's test split, and print those that do not score 1, and the time:
`python scripts/benchmark/reference_solutions.py HumanEval.jsonl.gz mbpp.jsonl`

The files are those of openai/human-eval and google-research/google-research.
"""

import gzip
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from side_by_side import Arguments

from hybridrl.rewards.scorers.code import compute_score

MBPP_TEST = range(11, 511)  # task ids


def tasks(path: Path) -> Iterator[tuple[Any, str, Any]]:
    """Yield the id, the reference program and the ground truth of each task of a file."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        rows = [json.loads(line) for line in file]
    for row in rows:
        if "canonical_solution" in row:
            yield row["task_id"], row["prompt"] + row["canonical_solution"], row
        elif row["task_id"] in MBPP_TEST:
            yield row["task_id"], row["test_setup_code"] + "\n" + row["code"], row


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    for path in parser.parse_args().files:
        every, began = list(tasks(path)), time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            scores = list(pool.map(lambda task: compute_score(f"```python\n{task[1]}\n```", task[2])["acc"], every))
        failed = [name for (name, _, _), score in zip(every, scores, strict=True) if score < 1]
        seconds = time.monotonic() - began
        print(
            f"{path.name}: {len(every) - len(failed)} of {len(every)} in {seconds:.0f} s; failed: {failed}", flush=True
        )


if __name__ == "__main__":
    main()

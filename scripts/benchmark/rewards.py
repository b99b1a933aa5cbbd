"""How many answers a second are scored: `python scripts/benchmark/rewards.py GSM8K.jsonl MATH.jsonl`

GSM8K.jsonl holds rows with question and answer, each taken as an answer to itself until there are 10,000; MATH.jsonl
rows with prediction and ground_truth. Both by the built-in scorers, in 2 processes; then programs, in the sandbox.
"""

import argparse
import json
import time
from itertools import cycle, islice
from pathlib import Path

from hybridrl.doctor.reward import reward_config
from hybridrl.rewards.pool import ScorerPool
from hybridrl.rewards.score import Answer

PROCESSES = 2
PROGRAM = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
TESTS = {"inputs": [f"{n} {n}\n" for n in range(10)], "outputs": [f"{2 * n}\n" for n in range(10)]}


def measure(name: str, answers: list[Answer], count: int) -> None:
    """Print the rate of the second of two passes: the first also fills caches."""
    answers = list(islice(cycle(answers), count))
    config = reward_config(None, [f"reward.num_workers={PROCESSES}"])
    with ScorerPool(config, None, {answer.data_source for answer in answers}) as pool:
        for _ in range(2):
            began = time.monotonic()
            scores = [future.result() for future in pool.submit(answers)]
            seconds = time.monotonic() - began
    right = sum(score.extras.get("acc", 0) for score in scores if score.fault is None)
    told = f"{right:.0f} right, {sum(score.fault is not None for score in scores)} faults"
    print(f"{name:<36} {count:>6} answers  {seconds:7.2f} s  {count / seconds:9,.0f}/s  {told}", flush=True)


def rows(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gsm8k", type=rows, help="rows with question and answer")
    parser.add_argument("math", type=rows, help="rows with prediction and ground_truth")
    files = parser.parse_args()
    solved = [
        Answer("gsm8k", row["answer"], row["answer"].rpartition("#### ")[2].replace(",", ""), {}) for row in files.gsm8k
    ]
    measure("GSM8K", solved, 10_000)
    boxed = [Answer("lighteval/MATH", row["prediction"], row["ground_truth"], {}) for row in files.math]
    measure("MATH (math-verify)", boxed, 10_000)
    numbers = [answer for answer in boxed if not answer.ground_truth.isdecimal()]
    measure("MATH, truths that are no integers", numbers, 2_000)
    measure("code, a program with 10 tests", [Answer("taco", PROGRAM, TESTS, {})], 100)


if __name__ == "__main__":
    main()

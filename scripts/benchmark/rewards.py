"""Measure scored responses per second: `python scripts/benchmark/rewards.py GSM8K.jsonl MATH.jsonl [--tokenizer DIR]`

GSM8K.jsonl holds rows with question and answer, each used as a response to itself until there are 10,000; MATH.jsonl
rows with prediction and ground_truth. Both use the built-in scorers in 2 processes; then programs run in the sandbox.
With --tokenizer, GSM8K is also scored as a run does it: token ids are sent to a Ray actor, which decodes them.
"""

import json
import tempfile
import time
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from side_by_side import Arguments
from transformers import AutoTokenizer

from hybridrl.core.cluster import RaySession
from hybridrl.data.tokenizer import ResponseDecoder, load_tokenizer
from hybridrl.doctor.reward import reward_config
from hybridrl.rewards.actors import open_scorer_pool
from hybridrl.rewards.pool import ScorerPool
from hybridrl.rewards.score import ScoringRequest

CONFIG = reward_config(None, ["reward.num_workers=2"])
PROGRAM = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
TESTS = {"inputs": [f"{n} {n}\n" for n in range(10)], "outputs": [f"{2 * n}\n" for n in range(10)]}


def measure(name: str, requests: list[ScoringRequest], count: int, pool: ScorerPool | None = None) -> None:
    """Print the rate and the driver's CPU time of the second of two rounds: the first also fills caches."""
    requests = list(islice(cycle(requests), count))
    with pool or ScorerPool(CONFIG, None, {request.data_source for request in requests}) as scorers:
        scorers.wait_until_loaded()
        for _ in range(2):
            began, cpu = time.monotonic(), time.process_time()
            scores = [future.result() for future in scorers.submit(requests)]
            seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    correct = sum(score.extras.get("acc", 0) for score in scores if score.fault is None)
    result = f"{correct:.0f} correct, {sum(score.fault is not None for score in scores)} faults"
    rate = f"{count:>6} responses  {seconds:7.2f} s  {count / seconds:9,.0f}/s  {cpu:5.2f} s of driver CPU"
    print(f"{name:<36} {rate}  {result}", flush=True)


def decoder(tokenizer_path: str) -> ResponseDecoder:
    tokenizer = load_tokenizer(tokenizer_path)
    return ResponseDecoder(tokenizer, [tokenizer.eos_token_id])


def measure_actors(requests: list[ScoringRequest], count: int, tokenizer_path: str) -> None:
    """Measure one scoring actor on this machine, with token ids as input."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    encoded = [
        ScoringRequest(one.data_source, None, one.ground_truth, {}, np.array(tokenizer(one.solution)["input_ids"]))
        for one in requests
    ]
    session = RaySession("cpu", 1, 1, {}, 60)
    try:
        with tempfile.TemporaryDirectory() as logs:
            load = partial(decoder, tokenizer_path)
            pool = open_scorer_pool(session, CONFIG, Path(logs), {"gsm8k"}, load)
            measure("GSM8K, decoded by an actor", encoded, count, pool)
    finally:
        session.close()


def rows(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = Arguments(__doc__, count=100)
    parser.add_argument("gsm8k", type=rows, help="rows with question and answer")
    parser.add_argument("math", type=rows, nargs="?", help="rows with prediction and ground_truth")
    parser.add_argument("--tokenizer", help="directory of a tokenizer: measure a scoring actor too")
    parser.add_argument(
        "--count", type=int, default=10_000, help="responses; a fifth of other truths, a hundredth of code"
    )
    arguments = parser.parse_args()
    count = arguments.count
    solved = [
        ScoringRequest("gsm8k", row["answer"], row["answer"].rpartition("#### ")[2].replace(",", ""), {})
        for row in arguments.gsm8k
    ]
    measure("GSM8K", solved, count)
    if arguments.tokenizer:
        measure_actors(solved, count, arguments.tokenizer)
    if arguments.math:
        boxed = [ScoringRequest("lighteval/MATH", row["prediction"], row["ground_truth"], {}) for row in arguments.math]
        measure("MATH (math-verify)", boxed, count)
        numbers = [request for request in boxed if not request.ground_truth.isdecimal()]
        measure("MATH, truths that are not integers", numbers, count // 5)
    measure("code, a program with 10 tests", [ScoringRequest("taco", PROGRAM, TESTS, {})], count // 100)


if __name__ == "__main__":
    main()

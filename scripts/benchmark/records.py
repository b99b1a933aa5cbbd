"""Cost of the files of samples per step: `python scripts/benchmark/records.py [--rows 256] [--tokens 36] [--step 1.4]`

Writes the records of a step of the quickstart's size, with and without tokens of a few samples, and compares the
seconds with a step's (`--step`, by default the median of the quickstart on two cores).
"""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch
from side_by_side import Arguments

from hybridrl.core.batch import Batch
from hybridrl.core.experience.batching import group_by_prompt, to_batch
from hybridrl.core.experience.trajectory import Episode, Trajectory, Turn
from hybridrl.data.prompts import Prompt
from hybridrl.rewards.score import Score
from hybridrl.runs.sample_log import SampleLog

ROUNDS, GROUP = 20, 8


def made_up_step(rows: int, tokens: int) -> tuple[list[Episode], Batch]:
    """Return episodes with a text of four characters per token, and the batch of a step made of them."""
    random = np.random.default_rng(0)
    episodes = []
    for row in range(rows):
        ids, log_probs = random.integers(1000, size=tokens), -random.random(tokens).astype(np.float32)
        prompt = Prompt(row // GROUP, [1] * 19, [{"role": "user", "content": "What is 767+488?"}], "sum", "1255", {})
        score = Score(float(row % 2), {"acc": float(row % 2), "pred": "1255", "worked": 1.0})
        trajectory = Trajectory([Turn([1] * 19, ids, log_probs, 0, "stop")])
        episodes.append(Episode(prompt, row // GROUP, row % GROUP, trajectory, "text" * tokens, score))
    batch = to_batch(group_by_prompt(episodes))
    batch.old_log_probs = batch.entropies = batch.rollout_log_probs
    batch.advantages = torch.randn(batch.response_ids.shape)
    return episodes, batch


def seconds_of(work: Callable[[], None]) -> float:
    """Return the median over ROUNDS calls."""
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return median(times)


def main() -> None:
    parser = Arguments(__doc__, rows=8, tokens=4)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=36, help="of each response")
    parser.add_argument("--step", type=float, default=1.4, help="seconds of a step without records")
    options = parser.parse_args()
    episodes, batch = made_up_step(options.rows, options.tokens)
    for with_tokens in (0, 4):
        with TemporaryDirectory() as place:
            log = SampleLog(
                None,
                training_dir=place,
                validation_dir=None,
                replay_dir=Path(place),
                shown=0,
                with_tokens=with_tokens,
                decode=lambda ids: ["text"] * len(ids),
            )
            seconds = seconds_of(lambda log=log: (log.training_samples(1, episodes, batch), log.flush()))
            size = Path(place, "1.jsonl").stat().st_size
        share = f"{seconds / options.step:.2%} of a step of {options.step:g} s"
        print(
            f"{options.rows} records, tokens of {with_tokens}: {seconds * 1e3:.1f} ms, {size / 1024:.0f} KiB; {share}"
        )


if __name__ == "__main__":
    main()

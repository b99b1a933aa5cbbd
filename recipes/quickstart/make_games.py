"""Make the inputs of the agent quickstart: a tiny model and its tokenizer, games of poor players, numbers to find.

The policy guesses a number from 1 to 31 and reads "low" or "high" after each wrong guess. The players of the
demonstrations keep what they read in mind, but often try the lowest number that is left; some bisect. Five guesses find
every number if all of them bisect: reinforcement learning finds that out.
"""

import random
from collections.abc import Iterator
from typing import Any

from make_data import Files, make

LOW, HIGH, GUESSES = 1, 31, 5
GAMES = 240 * 32  # one epoch is 240 steps of 32
SHARE_BISECTING = 0.5  # of the guesses; the others are the lowest number that is left
QUESTION = "?"


def game(target: int, draw: random.Random) -> list[dict[str, str]]:
    """Return a game as messages; a guess bisects, or is the lowest number that is left."""
    low, high, messages = LOW, HIGH, [{"role": "user", "content": QUESTION}]
    while True:
        bisects = draw.random() < SHARE_BISECTING
        guess = (low + high) // 2 if bisects else low
        messages.append({"role": "assistant", "content": f"{guess:02d}"})
        if guess == target or len(messages) == 2 * GUESSES:
            return messages
        low, high = (guess + 1, high) if guess < target else (low, guess - 1)
        messages.append({"role": "user", "content": "low" if guess < target else "high"})


def warmup_rows(seed: int) -> Iterator[dict[str, Any]]:
    draw = random.Random(f"games {seed}")
    for _ in range(GAMES):
        yield {"messages": game(draw.randint(LOW, HIGH), draw)}


def rows(targets: list[int]) -> Iterator[dict[str, Any]]:
    """Yield rows for reinforcement learning and validation."""
    for index, target in enumerate(targets):
        yield {
            "data_source": "quickstart/guess_number",
            "prompt": [{"role": "user", "content": QUESTION}],
            "reward_model": {"style": "rule", "ground_truth": str(target)},
            "extra_info": {"target": target, "low": LOW, "high": HIGH, "index": index},
        }


def files(seed: int) -> Files:
    numbers = list(range(LOW, HIGH + 1))
    return {"warmup.jsonl": warmup_rows(seed), "train.jsonl": rows(numbers), "val.jsonl": rows(numbers)}


if __name__ == "__main__":
    make("Make the agent quickstart's model, tokenizer and data.", ("low", "high"), files)

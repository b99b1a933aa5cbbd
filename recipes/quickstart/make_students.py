"""Make the inputs of the recipes with teachers: those of the quickstart, demonstrations for two other students, pairs
of responses for a reward model, and verdicts for a judge.

The careless student forgets every carry, so that it never samples the right way. The hinted one is as undecided as the
quickstart's, but has learned what a comment on a wrong response means: it then minds the carries. Of a pair the first
response is careful, the other one careless or without work. A judge works out the sum and compares it with the last
number of a response, which is careful, careless, without work, or careful with another digit.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from make_data import (
    WARMUP_PROBLEMS,
    WARMUP_ROWS,
    Problem,
    careful,
    careless,
    draw_problems,
    files,
    lazy,
    make,
    question,
    warmup_rows,
)

from hybridrl.config.judge import BEGIN, END

COMMENT = "The carries were wrong."
PAIRS = 100 * 32
VERDICTS = 300 * 32
TEMPLATE = Path(__file__).parents[1] / "teachers" / "verdict.txt"


def demonstration(prompt: str, response: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]}


def careless_rows(seed: int) -> Iterator[dict[str, Any]]:
    problems, draw = draw_problems("train", WARMUP_PROBLEMS, 1000 + seed), random.Random(f"careless {seed}")
    for problem in draw.choices(problems, k=WARMUP_ROWS):
        yield demonstration(question(problem), careless(problem))


def hinted_rows(seed: int) -> Iterator[dict[str, Any]]:
    """Yield the quickstart's demonstrations, every other one replaced by a careful one after a comment."""
    problems, draw = draw_problems("train", WARMUP_PROBLEMS, 1000 + seed), random.Random(f"hinted {seed}")
    for number, row in enumerate(warmup_rows(seed)):
        problem = draw.choice(problems)
        commented = demonstration(f"{question(problem)}\n{COMMENT}", careful(problem))
        yield commented if number % 2 else row


def pair_rows(seed: int) -> Iterator[dict[str, Any]]:
    problems, draw = draw_problems("train", WARMUP_PROBLEMS, 1000 + seed), random.Random(f"pairs {seed}")
    carrying = [problem for problem in problems if careful(problem) != careless(problem)]
    for problem in draw.choices(carrying, k=PAIRS):
        worse = draw.choice([careless, lazy])
        yield {"prompt": question(problem), "chosen": careful(problem), "rejected": worse(problem)}


def damaged(problem: Problem, draw: random.Random) -> str:
    """Return a careful response with another digit in its last line."""
    text = careful(problem)
    place = draw.randrange(text.rindex(" ") + 1, len(text))
    return text[:place] + draw.choice("0123456789".replace(text[place], "")) + text[place + 1 :]


def verdict_rows(seed: int) -> Iterator[dict[str, Any]]:
    problems, draw = draw_problems("train", WARMUP_PROBLEMS, 1000 + seed), random.Random(f"verdicts {seed}")
    template = TEMPLATE.read_text()
    for problem in draw.choices(problems, k=VERDICTS):
        kinds = careful(problem), careless(problem), lazy(problem), damaged(problem, draw)
        (response,) = draw.choices(kinds, (4, 2, 3, 1))
        verdict = "yes" if int(response.rpartition("#### ")[2]) == sum(problem) else "no"
        shown = template.replace("{{prompt}}", question(problem)).replace("{{response}}", f"{BEGIN}\n{response}\n{END}")
        yield demonstration(shown, f"{careful(problem)}\nVERDICT: {verdict}")


if __name__ == "__main__":
    words = question((767, 488)), careful((767, 488))
    description = "Make the model, tokenizer and data of the recipes with teachers."
    of_students = {"careless.jsonl": careless_rows, "hinted.jsonl": hinted_rows, "pairs.jsonl": pair_rows}
    of_students["verdicts.jsonl"] = verdict_rows
    make(description, words, lambda seed: files(seed) | {name: rows(seed) for name, rows in of_students.items()})

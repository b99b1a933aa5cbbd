"""DAPO's mathematics: the result on the last line "Answer: ...", or boxed; a wrong answer costs a point, as in verl."""

from typing import Any

from hybridrl.rewards.scorers.boxed import last_answer_line, last_boxed
from hybridrl.rewards.scorers.math import is_equal, verdict


def compute_score(solution_str: str, ground_truth: Any, strict_box_verify: bool = False) -> dict[str, Any]:
    r"""1 where the result equals the ground truth, else -1; `acc` is 1 or 0.

    verl compares texts after rewriting them; here 1/2 and 0.5 are the same. With `strict_box_verify` only a box counts.
    """
    line, boxed = last_answer_line(solution_str), last_boxed(solution_str)
    result = boxed if strict_box_verify or line is None else last_boxed(line) or line.strip("*$ ").rstrip("*$. ")
    found = verdict(result or "", is_equal(result or "", str(ground_truth)))
    return found | {"score": 1.0 if found["acc"] else -1.0}

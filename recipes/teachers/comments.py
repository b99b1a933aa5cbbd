"""The reward of recipes/teachers/commented.yaml: whether a sum is right, and a comment on a wrong one."""

import re
from typing import Any

ANSWER = re.compile(r"#### (-?[0-9]+)")


def compute_score(solution_str: str, ground_truth: str) -> dict[str, Any]:
    """Return score 1 if the last "#### number" is the ground truth, else 0 and the comment in "feedback"."""
    answers = ANSWER.findall(solution_str)
    right = bool(answers) and answers[-1] == ground_truth
    return {"score": float(right), "acc": float(right), "feedback": "" if right else "The carries were wrong."}

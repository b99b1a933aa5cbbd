"""The reward of recipes/geo3k: 0.9 for the right result in a box, and 0.1 for the form that the prompt requests."""

import re
from typing import Any

from hybridrl.rewards.scorers import math

FORM = re.compile(r"\s*<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return `score`, `acc` (1 if the box has the value of the ground truth), `form`, and the box as `pred`."""
    graded = math.compute_score(solution_str, ground_truth)
    form = float(FORM.fullmatch(solution_str) is not None)
    return {"score": 0.9 * graded["acc"] + 0.1 * form, "acc": graded["acc"], "form": form, "pred": graded["pred"]}

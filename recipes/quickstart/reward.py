"""The quickstart's reward: GSM8K's strict rule. It is an example of a custom reward file:

hybridrl train reward.custom_reward_function.path=recipes/quickstart/reward.py ...
"""

import re
from typing import Any

ANSWER = re.compile(r"#### (-?[0-9.,]+)")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return score 1 if the last "#### number" is the ground truth; `worked` is 1 if there is text before it."""
    answers = ANSWER.findall(solution_str)
    pred = answers[-1].replace(",", "") if answers else ""
    score = float(pred == ground_truth)
    return {
        "score": score,
        "acc": score,
        "pred": pred,
        "worked": float(solution_str.strip().find("####") > 0),
    }


def compute_colour_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """Return 1 if the response is the name of the colour alone."""
    return float(solution_str.strip() == ground_truth)

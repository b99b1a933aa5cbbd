"""The quickstart's reward: GSM8K's strict rule. An example of a reward file of your own:

python -m hybridrl.main_ppo reward.custom_reward_function.path=recipes/quickstart/reward.py ...
"""

import re
from typing import Any

ANSWER = re.compile(r"#### (-?[0-9.,]+)")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """1 where the last "#### number" is the ground truth; `worked` where anything stands before it."""
    answers = ANSWER.findall(solution_str)
    pred = answers[-1].replace(",", "") if answers else ""
    score = float(pred == ground_truth)
    return {
        "score": score,
        "acc": score,
        "pred": pred,
        "worked": float(solution_str.strip().find("####") > 0),
    }

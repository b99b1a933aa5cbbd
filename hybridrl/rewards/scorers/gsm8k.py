"""GSM8K: the answer's number against the ground truth's, as text."""

import re
from typing import Any

from hybridrl.config import ConfigError

# It starts with a digit, so that a run of dots and commas is neither an answer nor slow to search.
_NUMBER = r"-?\.?[0-9][0-9.,]*"
_PATTERNS = {"strict": re.compile(rf"#### ({_NUMBER})"), "flexible": re.compile(rf"({_NUMBER})")}


def compute_score(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """`score` if the last number is the ground truth, `format_score` if it is another one, 0 without one.

    "strict" looks for numbers after "#### ", "flexible" for any. The whole answer is searched; verl
    reads its last 300 characters, which calls a right answer wrong where text follows it.
    """
    if method not in _PATTERNS:
        raise ConfigError(
            f"reward.custom_reward_function.reward_kwargs.method={method}: "
            f"GSM8K answers are read by one of {', '.join(_PATTERNS)}"
        )
    numbers = _PATTERNS[method].findall(solution_str)
    if not numbers:
        return 0.0
    return score if _normalised(numbers[-1]) == _normalised(str(ground_truth)) else format_score


def _normalised(number: str) -> str:
    """1,875. and $1875 are 1875; 18.00 is not 18."""
    return number.strip().replace(",", "").replace("$", "").rstrip(".")

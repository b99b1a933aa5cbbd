"""An answer, its score, and the way from what a reward function returns to a score.

Knows neither where the function came from nor in which process it runs.
"""

import logging
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

logger = logging.getLogger(__name__)


@dataclass
class Answer:
    """What a reward function is asked about; `solution` is the decoded response."""

    data_source: str
    solution: str
    ground_truth: Any
    extra_info: dict[str, Any]


@dataclass
class Score:
    """The verdict on one answer, e.g. `Score(1.0, {"acc": 1.0})`; a wrong answer is 0.0 and no fault.

    Where the grader itself failed, `value` is None, `detail` a line for people and `fault` the class:
    "none", "nan" (or infinite), "type", "raised:<exception>", "timeout" or "died".
    `extras` holds every key of a returned dict, or {"acc": value}, as plain Python values.
    """

    value: float | None
    extras: dict[str, Any] = field(default_factory=dict)
    fault: str | None = None
    detail: str = ""


RewardFunction = Callable[[Answer], Any]


def score_answer(reward: RewardFunction, answer: Answer) -> Score:
    """Call the reward function; whatever it raises becomes a fault, its traceback goes to the log."""
    try:
        return to_score(reward(answer))
    except Exception as error:
        logger.warning("the reward function failed on a row of %s", answer.data_source, exc_info=True)
        return Score(None, fault=f"raised:{type(error).__name__}", detail=_where_and_what(error))


def to_score(returned: Any) -> Score:
    """The score in a returned number, dict with "score", or sequence that starts with a number."""
    if isinstance(returned, dict):
        if "score" not in returned:
            return Score(None, fault="type", detail=f'returned a dict without "score"; its keys: {list(returned)}')
        number, extras = returned["score"], {str(key): _plain(value) for key, value in returned.items()}
    else:
        number, extras = (returned[0] if isinstance(returned, list | tuple) and returned else returned), {}
    if number is None:
        return Score(None, fault="none", detail="returned None")
    value = _as_float(number)
    if value is None:
        detail = f"returned {number!r:.80} ({type(number).__name__}), which is not a number"
        return Score(None, fault="type", detail=detail)
    if not math.isfinite(value):
        return Score(None, fault="nan", detail=f"returned {value}")
    return Score(value, extras or {"acc": value})


def _as_float(number: Any) -> float | None:
    """Whatever converts itself to a float (numpy and torch scalars too), but no text that looks like one."""
    if not isinstance(number, SupportsFloat):
        return None
    try:
        return float(number)
    except (TypeError, ValueError):
        return None


def _plain(value: Any) -> Any:
    """The value without classes of the user's or of numpy, so that any process can unpickle and dump it."""
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    number = _as_float(value)
    return None if value is None else str(value) if number is None else number


def _where_and_what(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message:.200} ({frame.filename}:{frame.lineno})"

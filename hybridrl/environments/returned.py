"""Rewards and metrics that the user's environments, tools and agents return, checked where they arrive."""

import logging
import math
import sys
from collections.abc import Mapping
from typing import Any

from hybridrl.environments.environment import EpisodeFault
from hybridrl.rewards.score import Score, as_number, as_score

logger = logging.getLogger(__name__)

_warned: set[str] = set()  # whose metrics have been reported in this process


def reward_of(value: Any, source: Any) -> float | None:
    """Return the reward that an object, class or function gave; None stays None.

    EpisodeFault, by the rules of reward functions: it is no finite number.
    """
    if value is None:
        return None
    try:
        score = as_score(value)
    except Exception as error:  # whatever the value's __float__ raises, such as that of a tensor of several numbers
        score = Score(None, detail=f"returned a {type(value).__name__} ({error})")
    if score.value is None:
        raise EpisodeFault(f"the reward of {name_of(source)} is no finite number: it {score.detail}")
    return score.value


def metrics_of(values: Any, source: Any) -> dict[str, float]:
    """Return the finite numbers among the metrics that an object, class or function gave, with a warning about the
    first other one."""
    if values is None:
        return {}
    found = {str(name): _finite(value) for name, value in values.items()} if isinstance(values, Mapping) else {}
    metrics = {name: value for name, value in found.items() if value is not None}
    name, others = name_of(source), [name for name in found if name not in metrics]
    if (others or not isinstance(values, Mapping)) and name not in _warned:
        _warned.add(name)
        what = ", ".join(others) if others else f"which are a {type(values).__name__}, not a dict"
        logger.warning("metrics of %s are left out that are no finite numbers: %s", name, what)
    return metrics


def _finite(value: Any) -> float | None:
    try:
        number = as_number(value)
    except Exception:  # whatever its __float__ raises
        return None
    return number if number is not None and math.isfinite(number) else None


def name_of(source: Any) -> str:
    """Return the name of a class, of that of an object, or of a function, with its file; a text is a name itself."""
    if isinstance(source, str):
        return source
    source = source if hasattr(source, "__qualname__") else type(source)
    file = getattr(sys.modules.get(source.__module__), "__file__", None)
    return f"{source.__qualname__} ({file})" if file else source.__qualname__

"""Returned and raised by the user's environments, tools and agents: results, rewards and metrics, checked where they
arrive. Imports nothing heavy, since the processes of functions import it."""

import json
import logging
import math
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.error import URLError

from hybridrl.agents.environments.environment import EpisodeFault, ToolError
from hybridrl.rewards.score import Score, as_number, as_score

logger = logging.getLogger(__name__)

# What clients of HTTP raise if nobody is at the other end; some are no subclass of ConnectionError.
UNREACHABLE = ("ConnectError", "ConnectionError", "ConnectTimeout", "ReadTimeout", "ReadError", "RemoteProtocolError")
_warned: set[str] = set()  # whose metrics have been reported in this process


@dataclass(frozen=True)
class ToolResult:
    """The result of a call: the text for the policy, a reward of this call for the reward function, and metrics."""

    text: str
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


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


def to_result(returned: Any, source: Any = "the tool") -> ToolResult:
    """Read what a tool returned; ToolError if it is not text, EpisodeFault if its reward is no finite number."""
    if isinstance(returned, ToolResult):
        reward, metrics = reward_of(returned.reward, source), metrics_of(returned.metrics, source)
        return ToolResult(_text(returned.text), reward, metrics)
    reward, metrics = None, {}
    if isinstance(returned, tuple) and 1 <= len(returned) <= 3:
        returned, reward, metrics = (*returned, None, None)[:3]
    if isinstance(returned, ToolResult):  # with a reward next to it
        returned = returned.text
    return ToolResult(_text(returned), reward_of(reward, source), metrics_of(metrics, source))


def _text(value: Any) -> str:
    """The text that the policy reads."""
    if isinstance(value, str):
        return value
    if any(getattr(value, kind, None) for kind in ("image", "video")):
        raise ToolError("the tool returned an image or a video, which this model cannot read")
    if hasattr(value, "text"):  # verl's ToolResponse
        return value.text or ""
    if isinstance(value, bytes | bytearray):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            raise ToolError(f"the tool returned {len(value)} bytes that are not text") from None
    if value is None:
        return ""
    kind = type(value)
    if kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__:
        raise ToolError(f"the tool returned a {kind.__name__}, which is not text")
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


def unreachable(error: BaseException) -> bool:
    """Whether an exception means that something outside cannot be reached or is broken, such as HTTP 5xx."""
    answer = getattr(error, "response", None)
    status = getattr(answer, "status_code", None) or getattr(error, "code", None)
    if isinstance(status, int):
        return 500 <= status < 600 or status == 429
    kinds = {cls.__name__ for cls in type(error).__mro__}
    return isinstance(error, ConnectionError | socket.gaierror | URLError) or not kinds.isdisjoint(UNREACHABLE)

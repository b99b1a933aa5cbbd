"""Requests and scores: the result of a reward function becomes a score, and is then scaled, clipped and penalised by
length; a missing score is a fault, under the policy on faults."""

import logging
import math
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from hybridrl.tracking.faults import fault_kind

if TYPE_CHECKING:
    import numpy as np

    from hybridrl.config.schema_parts import RewardConfig

logger = logging.getLogger(__name__)

LARGEST = 1e18  # limit of a score: estimators and losses square it in float32
LONGEST = 100  # characters of the name of a fault
MOST_BITS = 1023  # limit of an integer among a sample's numbers: a float holds it
# In `extra_info` of a conversation: the policy's own text, a turn per line, without the text that it read; and until
# this is decoded, the token ids of each turn.
WRITTEN, WRITTEN_IDS = "written", "written_ids"
JUDGE_CALLS, _SUMMED = "judge_calls", ("retries", "cached", "unparsed", "tokens")
NO_ANSWER = (None, "", "[INVALID]")  # what reward functions return as `pred`; the last one is verl's


@dataclass
class ScoringRequest:
    """One response to score. `solution` is its text; None: the scorer decodes `response_ids`, its token ids."""

    data_source: str
    solution: str | None
    ground_truth: Any
    extra_info: dict[str, Any]
    response_ids: "Sequence[int] | np.ndarray | None" = None
    prompt: Any = None  # its text or messages; None: unknown


@dataclass
class Score:
    """The score of one response, e.g. `Score(1.0, {"acc": 1.0})`; a wrong response has 0.0 and is not a fault.

    Without a score `value` is None, `detail` a readable line and `fault` of a kind in tracking/faults.py.
    `extras` holds every key of a returned dict, or {"acc": value}, as plain Python values. `token_rewards` are one
    per response token and sum to `value`; None: all of it is on the last token. `text` is the decoded response of a
    request without a `solution`.
    """

    value: float | None
    extras: dict[str, Any] = field(default_factory=dict)
    fault: str | None = None
    detail: str = ""
    token_rewards: list[float] | None = None
    text: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name; `vars` would add a dict to the score for as long as it lives."""
        return {name: getattr(self, name) for name in SCORE_FIELDS}

    def with_value(self, value: float) -> "Score":
        """Return this score with another value; the difference goes to the last token."""
        if self.token_rewards is None or self.value is None:
            return replace(self, value=value)
        *others, last = self.token_rewards
        return replace(self, value=value, token_rewards=[*others, last + value - self.value])


SCORE_FIELDS = [item.name for item in fields(Score)]


def checked(fields: Any) -> Score:
    """Return the score with these fields, which come from a scoring process; TypeError if they are not those of one,
    which a reward may have written itself."""
    score = Score(*fields)
    value, tokens = score.value, score.token_rewards
    numbers = (0.0 if value is None else value, *(tokens or ()))
    if not all(type(number) is float and abs(number) <= LARGEST for number in numbers):
        raise TypeError(f"its value is {value!r:.40}")
    if (value is None) != isinstance(score.fault, str) or not isinstance(tokens, list | None):
        raise TypeError(f"its fault is {score.fault!r:.40}")
    if not (isinstance(score.extras, dict) and isinstance(score.detail, str) and isinstance(score.text, str | None)):
        raise TypeError("it has a field of another type")
    if score.fault is not None:
        score.fault, score.detail = score.fault[:LONGEST], score.detail[: 10 * LONGEST]
    return score


class OutOfTime(Exception):
    """A call of a reward function was cancelled at its time limit."""


class NoScore(Exception):
    """A call of a reward function has no score; `fault`, `detail` and `extras` are those of its Score."""

    def __init__(self, *, fault: str, detail: str, extras: dict[str, Any] | None = None) -> None:
        super().__init__(detail)
        self.fault, self.extras = fault, extras or {}


def score_request(reward: Callable[[ScoringRequest], Score], request: ScoringRequest) -> Score:
    """Call the reward; an exception becomes a fault, and its traceback goes to the log."""
    try:
        return reward(request)
    except (Exception, SystemExit) as error:
        return fault_of(error, f"a row of {request.data_source}")


def fault_of(error: Exception | SystemExit, context: str) -> Score:
    """Return the fault for an exception of a reward function."""
    if isinstance(error, OutOfTime):
        return Score(None, fault="timeout", detail=str(error))
    if isinstance(error, NoScore):
        logger.warning("no score (%s): %s", error.fault, error)
        return Score(None, plain(error.extras), error.fault, str(error))
    logger.warning("the reward function failed on %s", context, exc_info=error)
    message = " ".join(str(error).split())
    if isinstance(error, SystemExit):
        message = f"the reward function called exit({error.code!r:.40}); return a score instead"
    frames = traceback.extract_tb(error.__traceback__)
    location = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    name = type(error).__name__
    return Score(None, fault=f"raised:{name}", detail=f"{name}: {message:.200}{location}")


def to_score(returned: Any, *, needs_score: bool = True) -> Score:
    """Convert a returned number, dict with "score" or "token_rewards", or sequence that starts with a number.

    Without `needs_score` a dict may have neither, and its value is 0. A "score" next to "token_rewards" must be their
    sum.
    """
    if not isinstance(returned, dict):
        score = as_score(returned[0] if isinstance(returned, list | tuple) and returned else returned, {})
        score.extras = {"acc": score.value} if score.fault is None else {}
        return score
    extras = {str(key): plain(value) for key, value in returned.items() if key != "token_rewards"}
    if returned.get("token_rewards") is None:
        if "score" not in returned and needs_score:
            return Score(None, fault="type", detail=f'returned a dict without "score"; its keys: {list(returned)}')
        if "score" in returned and returned["score"] is None:  # one of several rewards may abstain
            return replace(as_score(None), extras={name: extras[name] for name in extras if name != "score"})
        return as_score(returned.get("score", 0.0), extras)

    tokens, total = returned["token_rewards"], returned.get("score")
    numbers = [as_number(number) for number in list(tokens)]
    if not numbers or None in numbers:
        return Score(None, fault="type", detail=f"token_rewards is not a list of numbers: {tokens!r:.80}")
    if not all(abs(number) <= LARGEST for number in numbers) or abs(value := math.fsum(numbers)) > LARGEST:
        return Score(None, fault="nan", detail=f"token_rewards, or their sum, are not finite or beyond {LARGEST:g}")
    if total is not None and not math.isclose(as_number(total) or 0.0, value, rel_tol=1e-4, abs_tol=1e-6):
        detail = f"token_rewards sum to {value:g}, but score is {total!r:.40}; leave score out, or make them agree"
        return Score(None, fault="type", detail=detail)
    return Score(value, extras | {"score": value}, token_rewards=numbers)


def combined(main: Score, further: Mapping[str, Score], weights: Mapping[str, float]) -> Score:
    """Combine scores into one, keeping each under its name; the first fault among them is the result's.

    The keys of `weights` are keys of the main score's extras, names of `further`, or "score", the main score's value.
    A "text" and "calls" in the extras of a further one are kept, without a weight.
    Empty: the main value and all further ones have equal weight. One that is None abstains: the others are added.
    """
    for name, score in further.items():
        if score.fault not in (None, "none"):
            return replace(score, detail=f"{name}: {score.detail}")
    if main.fault not in (None, "none"):
        return main
    keys = ("text", "calls")
    texts = {
        f"{name}_{key}": score.extras[key] for name, score in further.items() for key in keys if key in score.extras
    }
    components = main.extras | {name: score.value for name, score in further.items()} | {"score": main.value}
    weights = weights or dict.fromkeys(["score", *further], 1.0)
    if main.fault == "none" and not main.extras:  # no dict, whose keys would be the others
        components = dict.fromkeys(weights) | components
    voting = {name: weight for name, weight in weights.items() if components.get(name, ...) is not None}
    if not voting:
        return Score(None, fault="none", detail=f"every reward returned None: {', '.join(weights)}")
    for name in voting:
        if not isinstance(components.get(name), bool | int | float):
            detail = f'reward.weights.{name}: the reward gave no number "{name}"; its keys: {", ".join(components)}'
            return Score(None, fault="type", detail=detail)
    total = as_score(sum(weight * float(components[name]) for name, weight in voting.items()))
    if total.value is None:
        return replace(total, detail=f"the weighted sum: {total.detail}")
    extras = components | texts | {"score": total.value}
    return replace(main.with_value(total.value), extras=extras, fault=None, detail="")


def component_means(scores: Sequence[Score]) -> dict[str, float]:
    """Return the mean of every reward component except the score, over the responses that have it; of the responses
    with a `pred`, the share without an answer; and metrics of a judge's calls."""
    components: dict[str, list[float]] = defaultdict(list)
    for score in scores:
        for name, value in score.extras.items():
            if isinstance(value, bool | int | float) and name != "score":
                components[name].append(float(value))
    means = {f"reward/{name}/mean": _mean(values) for name, values in components.items()}
    unparsed = [score.extras["pred"] in NO_ANSWER for score in scores if "pred" in score.extras]
    means |= {"reward/unparsed": sum(unparsed) / len(unparsed)} if any(unparsed) else {}
    return means | _judge_metrics(scores)


def _judge_metrics(scores: Sequence[Score]) -> dict[str, float]:
    """Return the latencies of a judge's requests at the median and the 90th percentile, and sums of their numbers;
    empty without calls."""
    listed = (score.extras.get(JUDGE_CALLS) for score in scores)
    calls = [call for each in listed if isinstance(each, list) for call in each if isinstance(call, dict)]
    if not calls:
        return {}
    sums = {f"judge/{name}": sum(as_number(call.get(name)) or 0.0 for call in calls) for name in _SUMMED}
    seconds = sorted(as_number(call["seconds"]) or 0.0 for call in calls if "seconds" in call)
    at = {share: seconds[-(-share * len(seconds) // 100) - 1] for share in (50, 90) if seconds}
    return sums | {f"judge/seconds_p{share}": value for share, value in at.items()}


def _mean(values: Sequence[float]) -> float:
    """Return the mean; NaN if there is none, as of both infinities."""
    try:
        return math.fsum(values) / len(values)
    except (OverflowError, ValueError):
        return math.nan


def plain(value: Any) -> Any:
    """Return the value without custom or numpy classes, so that any process can unpickle and dump it. An integer too
    large for a float becomes hexadecimal text, which has no limit of digits."""
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        return hex(value)
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    if hasattr(value, "tolist") and isinstance(items := value.tolist(), list) and len(items) > 1:
        return plain(items)  # an array or tensor
    number = as_number(value)
    return None if value is None else str(value) if number is None else number


def as_score(number: Any, extras: dict[str, Any] | None = None) -> Score:
    """Return the score of one returned number, or the fault that it is none, not finite, or beyond LARGEST."""
    if number is None:
        return Score(None, fault="none", detail="returned None")
    value = as_number(number)
    if value is None:
        detail = f"returned {number!r:.80} ({type(number).__name__}), which is not a number"
        return Score(None, fault="type", detail=detail)
    if not math.isfinite(value):
        return Score(None, fault="nan", detail=f"returned {value}")
    if abs(value) > LARGEST:
        return Score(None, fault="nan", detail=f"returned {value:g}, more than {LARGEST:g}: its square is infinite")
    return Score(value, extras or {})


def as_number(number: Any) -> float | None:
    """Convert anything with __float__ (numpy and torch scalars too), but not a text that looks like a number."""
    if not hasattr(number, "__float__"):  # ten times as fast as isinstance(number, SupportsFloat)
        return None
    try:
        return float(number)
    except OverflowError:  # an integer of more than 308 digits
        return math.inf
    except (TypeError, ValueError):
        return None


@dataclass(frozen=True)
class OverlongPenalty:
    """Soft overlong punishment (DAPO, Yu et al. 2025), equal to verl's reward manager "dapo".

    Beyond `max_length - buffer` tokens the score falls linearly, by `factor` at `max_length`.
    """

    max_length: int
    buffer: int
    factor: float
    log: bool

    def of(self, length: int) -> float:
        """Return the addend for a response of `length` tokens; 0 or less."""
        excess = length - (self.max_length - self.buffer)
        return min(0.0, -excess / self.buffer * self.factor)


@dataclass(frozen=True)
class Shaping:
    """The score times `scale`, clipped to `clip`, plus the length penalty; other values of the scorer are unchanged."""

    scale: float = 1.0
    clip: tuple[float, float] | None = None
    overlong: OverlongPenalty | None = None

    @classmethod
    def of(cls, config: "RewardConfig") -> "Shaping":
        buffer, clip = config.reward_kwargs.overlong_buffer_cfg, config.clip_range
        overlong = None
        if config.reward_manager.name == "dapo" and buffer.enable:
            overlong = OverlongPenalty(config.reward_kwargs.max_resp_len, buffer.len, buffer.penalty_factor, buffer.log)
        return cls(config.scale, (clip[0], clip[1]) if clip else None, overlong)

    def shaped(self, score: Score, length: int) -> Score:
        """Return the shaped score of a response of `length` tokens; a fault is unchanged."""
        unchanged = self.scale == 1 and self.clip is None and self.overlong is None and score.token_rewards is None
        if score.value is None or unchanged:
            return score
        value = scaled = self.scale * score.value
        rewards, extras = score.token_rewards, dict(score.extras)
        if self.clip is not None:
            value = min(max(scaled, self.clip[0]), self.clip[1])
            extras["clipped"] = value != scaled
        if self.overlong is not None:
            penalty = self.overlong.of(length)
            value += penalty
            if self.overlong.log:
                extras |= {"overlong_reward": penalty, "overlong": penalty < 0}
        rewards = rewards and [self.scale * reward for reward in rewards]
        return replace(score, value=scaled, token_rewards=rewards, extras=extras).with_value(value)


class RewardFaults(RuntimeError):
    """The reward function failed too often to continue."""

    code = "reward-faults"


@dataclass
class FaultGuard:
    """Applies `reward.on_error` (exclude, zero, stop) and the limit on faults to the scores of each step."""

    on_error: str
    max_fault_rate: float
    max_fault_steps: int
    steps_above: int = field(default=0, init=False)  # consecutive steps with too many faults

    def apply(self, scores: list[Score]) -> None:
        """Under "zero" set the value of faults to 0.0 in place; under "stop" raise RewardFaults at the first fault."""
        failed = [score for score in scores if score.fault is not None]
        if failed and self.on_error == "stop":
            raise RewardFaults(f"{diagnosis(scores)}; reward.on_error=stop ends the run at the first")
        if self.on_error == "zero":
            for score in failed:
                score.value = 0.0

    def check(self, scores: list[Score]) -> dict[str, float]:
        """Return the number of a complete step's faults and that of each class as metrics; RewardFaults after too many
        steps with too many of them."""
        faults = Counter(score.fault for score in scores if score.fault is not None)
        above = faults.total() / max(len(scores), 1) > self.max_fault_rate
        self.steps_above = self.steps_above + 1 if above else 0
        if faults and self.steps_above >= self.max_fault_steps:
            raise RewardFaults(
                f"{diagnosis(scores)}; more than reward.max_fault_rate={self.max_fault_rate:g} "
                f"failed in {self.steps_above} steps in a row (reward.max_fault_steps)"
            )
        by_class = {f"reward/faults/{fault}": count for fault, count in faults.items()}
        return {"reward/faults": faults.total(), **by_class}


def diagnosis(scores: Sequence[Score]) -> str:
    """Return the number of each fault of some scores, and the kind and the first detail of the most frequent fault."""
    faults = Counter(score.fault for score in scores if score.fault is not None)
    ((fault, count),) = faults.most_common(1)
    example = next(score.detail for score in scores if score.fault == fault)
    return (
        f"{faults.total()} of {len(scores)} responses could not be scored ({dict(faults)}), mostly "
        f'({count / faults.total():.0%}) with fault "{fault}" ({fault_kind(fault)}): {example}'
    )

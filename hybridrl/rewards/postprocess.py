"""What happens to scores after grading: scaling, clipping, the length penalty, and the policy on scorer faults."""

from collections import Counter
from dataclasses import dataclass, field, replace

from hybridrl.rewards.score import Score


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

    def shaped(self, score: Score, length: int) -> Score:
        """Return the shaped score of a response of `length` tokens; a fault is unchanged."""
        if score.value is None:
            return score
        if score.token_rewards is not None:
            score = replace(score, token_rewards=[self.scale * reward for reward in score.token_rewards])
        value = self.scale * score.value
        score, extras = replace(score, value=value), {}
        if self.clip is not None:
            clipped = min(max(value, self.clip[0]), self.clip[1])
            extras["clipped"], value = clipped != value, clipped
        if self.overlong is not None:
            penalty = self.overlong.of(length)
            value += penalty
            if self.overlong.log:
                extras |= {"overlong_reward": penalty, "overlong": penalty < 0}
        return replace(score.with_value(value), extras=score.extras | extras)


class RewardFaults(RuntimeError):
    """The reward function failed too often to continue."""


@dataclass
class FaultCounts:
    """One step's faults by class, e.g. `FaultCounts(256, {"timeout": 2, "raised:KeyError": 1})`."""

    responses: int
    by_class: Counter[str]

    @property
    def rate(self) -> float:
        """The share of responses without a score."""
        return self.by_class.total() / max(self.responses, 1)

    def metrics(self) -> dict[str, float]:
        """Return the counts as metrics, in total and by class."""
        by_class = {f"reward/faults/{fault}": count for fault, count in self.by_class.items()}
        return {"reward/faults": self.by_class.total(), **by_class}


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
            raise RewardFaults(f"{_diagnosis(_counts(scores), failed)}; reward.on_error=stop ends the run at the first")
        if self.on_error == "zero":
            for score in failed:
                score.value = 0.0

    def check(self, scores: list[Score]) -> FaultCounts:
        """Count the faults of a complete step; RewardFaults after too many steps with too many of them."""
        counts, failed = _counts(scores), [score for score in scores if score.fault is not None]
        self.steps_above = self.steps_above + 1 if counts.rate > self.max_fault_rate else 0
        if failed and self.steps_above >= self.max_fault_steps:
            raise RewardFaults(
                f"{_diagnosis(counts, failed)}, and more than reward.max_fault_rate={self.max_fault_rate:g} "
                f"failed in {self.steps_above} steps in a row (reward.max_fault_steps)"
            )
        return counts


def _counts(scores: list[Score]) -> FaultCounts:
    return FaultCounts(len(scores), Counter(score.fault for score in scores if score.fault is not None))


def _diagnosis(counts: FaultCounts, failed: list[Score]) -> str:
    fault, count = counts.by_class.most_common(1)[0]
    example = next(score.detail for score in failed if score.fault == fault)
    return (
        f"the reward function failed on {len(failed)} of {counts.responses} responses, "
        f'mostly ({count / len(failed):.0%}) with fault "{fault}": {example}'
    )

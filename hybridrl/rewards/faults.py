"""When the grader's own faults are borne and when they end the run. Knows scores only."""

from collections import Counter
from dataclasses import dataclass, field

from hybridrl.rewards.score import Score


class RewardFaults(RuntimeError):
    """The reward function failed too often to go on."""


@dataclass
class FaultCounts:
    """One step's faults by class, e.g. `FaultCounts(256, {"timeout": 2, "raised:KeyError": 1})`."""

    answers: int
    by_class: Counter[str]

    @property
    def rate(self) -> float:
        return self.by_class.total() / max(self.answers, 1)

    def metrics(self) -> dict[str, float]:
        return {
            "reward/faults": self.by_class.total(),
            **{f"reward/faults/{fault}": count for fault, count in self.by_class.items()},
        }


@dataclass
class FaultGuard:
    """Applies `reward.on_error` (exclude, zero, stop) and the limit on faults to the scores of each step."""

    on_error: str
    max_fault_rate: float
    max_fault_steps: int
    steps_above: int = field(default=0, init=False)  # in a row, with too many faults

    def settle(self, scores: list[Score]) -> None:
        """Under "zero" a fault's value becomes 0.0 in place; under "stop" the first raises RewardFaults."""
        failed = [score for score in scores if score.fault is not None]
        if failed and self.on_error == "stop":
            counts = FaultCounts(len(scores), Counter(score.fault for score in failed))
            raise RewardFaults(f"{_diagnosis(counts, failed)}; reward.on_error=stop ends the run at the first")
        if self.on_error == "zero":
            for score in failed:
                score.value = 0.0

    def check(self, scores: list[Score]) -> FaultCounts:
        """Count the faults of a whole step; RewardFaults after too many steps with too many of them."""
        failed = [score for score in scores if score.fault is not None]
        counts = FaultCounts(len(scores), Counter(score.fault for score in failed))
        self.steps_above = self.steps_above + 1 if counts.rate > self.max_fault_rate else 0
        if failed and self.steps_above >= self.max_fault_steps:
            raise RewardFaults(
                f"{_diagnosis(counts, failed)}, and more than reward.max_fault_rate={self.max_fault_rate:g} "
                f"failed in {self.steps_above} steps in a row (reward.max_fault_steps)"
            )
        return counts


def _diagnosis(counts: FaultCounts, failed: list[Score]) -> str:
    fault, count = counts.by_class.most_common(1)[0]
    example = next(score.detail for score in failed if score.fault == fault)
    return (
        f"the reward function failed on {len(failed)} of {counts.answers} answers, "
        f'mostly ({count / len(failed):.0%}) with fault "{fault}": {example}'
    )

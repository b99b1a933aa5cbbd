"""A penalty on answers that come close to the length limit. Knows lengths and scores, not what was asked."""

from dataclasses import dataclass, replace

from hybridrl.rewards.score import Score


@dataclass(frozen=True)
class OverlongPenalty:
    """Soft overlong punishment (DAPO, Yu et al. 2025), as verl's reward manager "dapo" has it.

    From `max_length - buffer` tokens on, the score falls by a straight line, by `factor` at `max_length`.
    """

    max_length: int
    buffer: int
    factor: float
    log: bool

    def shaped(self, score: Score, length: int) -> Score:
        """The score of an answer of `length` tokens less its penalty; the grader's own extras stay as they are."""
        if score.value is None:
            return score
        excess = length - (self.max_length - self.buffer)
        penalty = min(0.0, -excess / self.buffer * self.factor)
        shown = {"overlong_reward": penalty, "overlong": penalty < 0} if self.log else {}
        return replace(score, value=score.value + penalty, extras=score.extras | shown)

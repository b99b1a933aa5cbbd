"""What is done to scores after grading: scaled, clipped, less a penalty on length. Knows no answer's text."""

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

    def of(self, length: int) -> float:
        """What an answer of `length` tokens gets on top of its score; 0 or less."""
        excess = length - (self.max_length - self.buffer)
        return min(0.0, -excess / self.buffer * self.factor)


@dataclass(frozen=True)
class Shaping:
    """The score times `scale`, then within `clip`, then less the penalty; what the grader said besides stays."""

    scale: float = 1.0
    clip: tuple[float, float] | None = None
    overlong: OverlongPenalty | None = None

    def shaped(self, score: Score, length: int) -> Score:
        """The score of an answer of `length` tokens; a fault stays one."""
        if score.value is None:
            return score
        if score.token_rewards is not None:
            score = replace(score, token_rewards=[self.scale * reward for reward in score.token_rewards])
        value = self.scale * score.value
        score, shown = replace(score, value=value), {}
        if self.clip is not None:
            clipped = min(max(value, self.clip[0]), self.clip[1])
            shown["clipped"], value = clipped != value, clipped
        if self.overlong is not None:
            penalty = self.overlong.of(length)
            value += penalty
            if self.overlong.log:
                shown |= {"overlong_reward": penalty, "overlong": penalty < 0}
        return replace(score.with_value(value), extras=score.extras | shown)

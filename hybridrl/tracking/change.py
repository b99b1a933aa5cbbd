"""A metric before and after training: the one definition behind every pair of figures about a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from hybridrl.tracking.sink import is_validation_score

LAST_STEPS = 5


@dataclass(frozen=True)
class Change:
    """`before` is the value of the first step, whose responses no update has touched, or of the first validation;
    `after` is the mean of the last `count` steps, or the last validation."""

    before: float
    after: float
    count: int

    @property
    def definition(self) -> str:
        """The meaning of the two numbers, for a reader."""
        return "first step; last step" if self.count == 1 else f"first step; mean of the last {self.count}"


def last_steps(steps: int) -> int:
    """Return how many of so many steps are the last ones: five, of a short run half of them."""
    return min(LAST_STEPS, max(1, steps // 2))


def change_of(name: str, values: Sequence[float]) -> Change:
    """Return a metric before and after training, from its values in order. A validation stands alone: each is a mean
    over many responses already. Raises ValueError if there are no values."""
    if not values:
        raise ValueError(f"{name} has no values")
    alone = is_validation_score(name) or name.startswith(("val-aux/", "val/"))
    count = 1 if alone else last_steps(len(values))
    return Change(values[0], fmean(values[-count:]), count)

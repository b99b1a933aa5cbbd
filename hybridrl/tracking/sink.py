"""What a sink is: one class with `log(step, metrics)`. A new destination of metrics is one such class."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SampleRow:
    """One validation answer as it is shown to people."""

    prompt: str
    answer: str
    ground_truth: str
    score: float


class Sink:
    """A destination of metrics; what a sink has no place for (sample tables, say) it leaves as it is here."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        raise NotImplementedError

    def samples(self, step: int, rows: list[SampleRow]) -> None:
        return

    def state(self) -> dict[str, Any]:
        """What a later process needs to go on in the same place.

        A saved step may outlive a power failure, so files that were written have reached the disk when this returns.
        """
        return {}

    def close(self) -> None:
        return

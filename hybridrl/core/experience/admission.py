"""Which groups are under way, which a step trains on, and how many may be started, so that no token is trained on that
is older than a bound. Counts groups only.

Nothing is dropped for its age: that would remove long responses more often than short ones, and a policy that is
rewarded for length would not learn it. What is bounded is how much is started (as in AReaL, Fu et al. 2025), and a step
waits for what could not be trained in time otherwise.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from hybridrl.core.rollout import Goal

QUEUED = 0.25  # requests that wait in the engines, as a share of those that run, and replace one that ends at once


@dataclass
class Admission:
    """Groups by their positions in the run's order; each step with the weights `version` trains `batch` of them.

    A group that is started with version u is trained at version u + `bound` at the latest. At most `most` groups are
    under way. 0 is the synchronous loop: all groups of a step are started with its weights.
    """

    bound: int
    batch: int
    most: int
    started: dict[int, int] = field(default_factory=dict)  # the version by position, of groups that are not trained yet

    def capacity(self, *, training: bool = False) -> int:
        """Return how many groups may be started now; `training`: while a step trains on the groups that it has.

        With the bound n a step finds at most (n + 1) * batch groups under way, which the n + 1 steps until the newest
        of them is due can train. One that has chosen its groups leaves n steps.
        """
        steps = self.bound if training else self.bound + 1
        return min(steps * self.batch, self.most - training * self.batch) - len(self.started)

    def start(self, positions: Iterable[int], version: int) -> None:
        self.started |= dict.fromkeys(positions, version)

    def end(self, positions: Iterable[int]) -> None:
        """Remove groups that are trained, or dropped."""
        for position in positions:
            del self.started[position]

    def choose(self, version: int, complete: Collection[int]) -> list[int] | None:
        """Return the groups to train now, in their order; None while it must wait for further ones to be complete.

        Those that are due first are chosen first. It waits until there are enough, and what is left over can be trained
        in time: of the groups due at version u, those that do not fit into the steps after this one up to u.
        """
        if not Goal(self._needs(version)).reached(complete):
            return None
        wanted = min(self.batch, len(self.started))
        by_due = sorted(complete, key=lambda position: (self.started[position], position))
        return sorted(by_due[:wanted])

    def goal(self, version: int, complete: Collection[int]) -> Goal:
        """Return what has to be sampled until groups can be chosen, given those that are complete already."""
        return Goal(
            [
                (some - set(complete), count - sum(one in some for one in complete))
                for some, count in self._needs(version)
            ]
        )

    def _needs(self, version: int) -> list[tuple[set[int], int]]:
        needs = [(set(self.started), min(self.batch, len(self.started)))]
        for due in range(version, version + self.bound):
            some = {position for position, start in self.started.items() if start + self.bound <= due}
            needs.append((some, len(some) - (due - version) * self.batch))
        return needs

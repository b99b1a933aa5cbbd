"""Dynamic sampling (DAPO, Yu et al. 2025): groups without signal are dropped and replaced by those of further prompts.

Knows groups and numbers of prompts; the collector runs the episodes.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridrl.core.experience.batching import reward_component
from hybridrl.core.experience.trajectory import Episode

logger = logging.getLogger(__name__)

METRIC_KEY, LIMIT_KEY = "algorithm.filter_groups.metric", "algorithm.filter_groups.max_num_gen_batches"
SCORE_NAMES = ("score", "seq_reward", "seq_final_reward")


class NoSignal(RuntimeError):
    """A step drew as many prompts as it may, and the responses to too few of them differ."""

    code = "no-signal"


@dataclass(frozen=True)
class GroupFilter:
    """The choice of groups with a signal; a step may draw `max_batches` times; 0: up to one pass over the data.

    `metric` is "score" (verl's seq_reward and seq_final_reward mean the same here) or a key of the reward's dict.
    `draw_size` prompts are drawn at a time; None: first as many as are wanted, then as many as are probably missing.
    A step that may draw no more is trained on what it has kept, if that is at least `least` groups.
    """

    metric: str
    max_batches: int
    draw_size: int | None = None
    least: int = 1

    def value(self, episode: Episode) -> float:
        if self.metric in SCORE_NAMES and episode.score.value is not None:
            return episode.score.value
        return reward_component(episode.score, self.metric, METRIC_KEY)

    def has_signal(self, group: Sequence[Episode]) -> bool:
        """Return whether the responses differ in the metric."""
        return len({self.value(episode) for episode in group}) > 1


@dataclass
class Draws:
    """The groups that a step has drawn so far, and in `kept` those to train on.

    `wanted` groups are to be kept. The run has `left` prompts from here on, and a pass over the data has `data_size`.
    """

    group_filter: GroupFilter | None
    wanted: int
    left: int
    data_size: int
    prompts: int = 0
    rounds: int = 0
    groups: list[list[Episode]] = field(default_factory=list)
    kept: list[list[Episode]] = field(default_factory=list)

    def add(self, prompts: int, groups: Sequence[list[Episode]]) -> None:
        """Add one draw: the number of its prompts, and their groups."""
        self.rounds += 1
        self.prompts += prompts
        self.groups += groups
        self.kept += [group for group in groups if self.group_filter is None or self.group_filter.has_signal(group)]

    def next_size(self) -> int:
        """Return how many prompts to draw next; 0 if the step is full or the run has no further prompts.

        Raises NoSignal if the step may draw no more and has too few groups to be trained on.
        """
        if self.group_filter is None:
            return 0 if self.rounds else self.wanted
        left, limit = self.left - self.prompts, self.group_filter.max_batches
        if not self.rounds:
            return min(self.group_filter.draw_size or self.wanted, left)
        if len(self.kept) >= self.wanted or (self.kept and not left):
            return 0
        allowed = left if limit > 0 else min(left, self.data_size - self.prompts)
        if allowed <= 0 or self.rounds == limit:
            if len(self.kept) < self.group_filter.least:
                raise NoSignal(self._diagnosis(self.group_filter))
            logger.warning("%s. This step is trained on the groups found", self._diagnosis(self.group_filter))
            return 0
        # As many as will probably fill the step, given the share kept so far.
        missing = self.wanted - len(self.kept)
        likely = min(math.ceil(missing * self.prompts / len(self.kept)), self.wanted) if self.kept else self.wanted
        size = min(self.group_filter.draw_size or likely, allowed)
        progress = (len(self.kept), self.wanted, self.prompts, size)
        logger.info("dynamic sampling: %d of %d groups after %d prompts; drawing %d more", *progress)
        return size

    def metrics(self) -> dict[str, float]:
        if self.group_filter is None:
            return {}
        return {
            "train/num_gen_batches": self.rounds,
            "sampling/groups_drawn": len(self.groups),
            "sampling/groups_without_signal": len(self.groups) - len(self.kept),
            "sampling/groups_left_out": max(len(self.kept) - self.wanted, 0),
        }

    def _diagnosis(self, group_filter: GroupFilter) -> str:
        flat = [group_filter.value(group[0]) for group in self.groups if not group_filter.has_signal(group)]
        seen = [group_filter.value(episode) for group in self.groups for episode in group]
        best, worst = max(seen), min(seen)
        split = f"{flat.count(best)} with every response at the best {group_filter.metric} seen ({best:g})"
        if worst < best:
            split += f", {flat.count(worst)} with every response at the worst ({worst:g})"
        at_limit = self.rounds == group_filter.max_batches
        bound = f"{LIMIT_KEY}={self.rounds}" if at_limit else "a pass over the data"
        if self.prompts == self.left:
            bound = "the last prompts of the run"
        return (
            f"dynamic sampling found {len(self.kept)} of {self.wanted} groups in {self.rounds} draws ({bound}): "
            f"{len(flat)} of the {len(self.groups)} groups drawn had no signal, {split}; use data of other difficulty, "
            f"raise actor_rollout_ref.rollout.n (more responses per prompt)"
            f"{f', raise {LIMIT_KEY}' if at_limit else ''} or set algorithm.filter_groups.enable=false"
        )

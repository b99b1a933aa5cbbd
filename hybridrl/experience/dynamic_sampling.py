"""Dynamic sampling (DAPO, Yu et al. 2025): groups without signal are dropped, further prompts drawn in their place.

Knows groups and numbers of prompts; answering them is experience.py's.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridrl.experience.batching import PromptGroup, reward_part
from hybridrl.experience.episodes import Sample

logger = logging.getLogger(__name__)

METRIC_KEY, LIMIT_KEY = "algorithm.filter_groups.metric", "algorithm.filter_groups.max_num_gen_batches"
SCORE_NAMES = ("score", "seq_reward", "seq_final_reward")


class NoSignal(RuntimeError):
    """As many prompts were drawn as a step may draw, and the answers to too few of them differ."""


@dataclass(frozen=True)
class GroupFilter:
    """Which groups have a signal and how often a step may draw: `max_batches` times, 0: one pass over the data.

    `metric` is "score" (verl's seq_reward and seq_final_reward mean the same here) or a key of the reward's dict.
    `draw_size` prompts are drawn at a time; None: first what is wanted, then what is likely to be missing.
    """

    metric: str
    max_batches: int
    draw_size: int | None = None

    def value(self, sample: Sample) -> float:
        if self.metric in SCORE_NAMES and sample.score.value is not None:
            return sample.score.value
        return reward_part(sample.score, self.metric, METRIC_KEY)

    def has_signal(self, group: PromptGroup) -> bool:
        """Whether the answers differ in the metric."""
        return len({self.value(sample) for sample in group.samples}) > 1


@dataclass
class Draws:
    """What one step has drawn so far: `groups` are all there are, `kept` those to learn from.

    `wanted` groups are to be kept; `left` prompts has the run from here on, and `data_size` a pass over the data.
    """

    group_filter: GroupFilter | None
    wanted: int
    left: int
    data_size: int
    prompts: int = 0
    rounds: int = 0
    groups: list[PromptGroup] = field(default_factory=list)
    kept: list[PromptGroup] = field(default_factory=list)

    def add(self, prompts: int, groups: Sequence[PromptGroup]) -> None:
        """Take in one draw: the number of its prompts, and the groups that they gave."""
        self.rounds += 1
        self.prompts += prompts
        self.groups += groups
        self.kept += [group for group in groups if self.group_filter is None or self.group_filter.has_signal(group)]

    def next_size(self) -> int:
        """How many prompts to draw next; 0: none, the step is full or the run has no further prompts.

        Raises NoSignal where more are needed and the step may draw no more, or nothing at all was kept.
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
            raise NoSignal(self._diagnosis(self.group_filter))
        size = min(self.group_filter.draw_size or self._likely(), allowed)
        logger.info(
            "dynamic sampling: %d of %d groups after %d prompts; drawing %d more",
            len(self.kept),
            self.wanted,
            self.prompts,
            size,
        )
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

    def _likely(self) -> int:
        """Prompts that will probably give the groups still missing, judged by the share kept so far."""
        missing = self.wanted - len(self.kept)
        return min(math.ceil(missing * self.prompts / len(self.kept)), self.wanted) if self.kept else self.wanted

    def _diagnosis(self, group_filter: GroupFilter) -> str:
        flat = [group_filter.value(group.samples[0]) for group in self.groups if not group_filter.has_signal(group)]
        seen = [group_filter.value(sample) for group in self.groups for sample in group.samples]
        best, worst = max(seen), min(seen)
        split = f"{flat.count(best)} with every answer at the best {group_filter.metric} seen ({best:g})"
        if worst < best:
            split += f", {flat.count(worst)} with every answer at the worst ({worst:g})"
        at_limit = self.rounds == group_filter.max_batches
        bound = f"{LIMIT_KEY}={self.rounds}" if at_limit else "a pass over the data"
        if self.prompts == self.left:
            bound = "the last prompts of the run"
        return (
            f"dynamic sampling found {len(self.kept)} of {self.wanted} groups in {self.rounds} draws ({bound}): "
            f"{len(flat)} of the {len(self.groups)} groups drawn had no signal, {split}; use data of other difficulty, "
            f"raise actor_rollout_ref.rollout.n (more answers a prompt){f', raise {LIMIT_KEY}' if at_limit else ''} "
            "or set algorithm.filter_groups.enable=false"
        )

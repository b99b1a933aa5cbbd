"""Groups: the scored episodes of one prompt, how they become rows of a batch, and which of them a step trains on.

Dynamic sampling (DAPO, Yu et al. 2025) drops groups without signal and replaces them by groups of further prompts. This
module does not depend on engines or data; the collector runs the episodes.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby

import numpy as np
import torch

from hybridrl.config.findings import ConfigError
from hybridrl.core.batch import Batch, pack
from hybridrl.core.carried import declared, joined
from hybridrl.core.experience.trajectory import Episode, Row
from hybridrl.required import required
from hybridrl.rewards.score import Score

logger = logging.getLogger(__name__)

COMPONENTS_KEY = "algorithm.gdpo_reward_keys"
METRIC_KEY, LIMIT_KEY = "algorithm.filter_groups.metric", "algorithm.filter_groups.max_num_gen_batches"
SCORE_NAMES = ("score", "seq_reward", "seq_final_reward")


def group_by_prompt(episodes: Sequence[Episode]) -> list[list[Episode]]:
    """Return sorted episodes by prompt, without those that have no score or no response: a fault before the first one,
    which `reward.on_error=zero` scores 0. A prompt without any has no group."""
    scored = [episode for episode in episodes if episode.score.value is not None and episode.trajectory.turns]
    return [list(group) for _, group in groupby(scored, key=lambda episode: episode.position)]


def reward_component(score: Score, name: str, key: str) -> float:
    """Return the reward component `name`, which the configuration's `key` requests; ConfigError if the reward did not
    return a number.

    A fault of the grader that counts as a score of 0 has no components: each counts as 0 as well.
    """
    if score.fault is not None and score.value is not None:
        return score.value
    value = score.extras.get(name)
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    returned = f"gave {value!r:.80}" if name in score.extras else "gave nothing"
    raise ConfigError(
        f'{key}: the reward {returned} under "{name}" where a number is needed; its keys are {", ".join(score.extras)}',
        fix=f'name one of these, or make the reward function return "{name}" in its dict for every response',
    )


def to_batch(
    groups: Sequence[Sequence[Episode]],
    reward_keys: Sequence[str] = (),
    *,
    greedy: Sequence[float] | None = None,
    mask_truncated: bool = False,
    version: int | None = None,
) -> Batch:
    """Return the groups as packed rows, numbered in their order, with the reward components named by `reward_keys`, and
    the score of each prompt's `greedy` response, if it was sampled.

    An episode is one row, or several neighbouring rows if its context was replaced. With `mask_truncated` no token of
    an episode cut by a length limit is trained on. `version` is the weight version at the start of the step, if
    tokens may have been sampled with other weights.
    """
    episodes = [episode for group in groups for episode in group]
    rows_of = [episode.trajectory.rows() for episode in episodes]
    rows, scores = list(chain.from_iterable(rows_of)), [episode.score for episode in episodes]
    counts = torch.tensor([len(episode_rows) for episode_rows in rows_of])
    sizes = torch.tensor([len(group) for group in groups])
    components = [[reward_component(score, name, COMPONENTS_KEY) for name in reward_keys] for score in scores]

    def packed(field: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return pack([getattr(row, field) for row in rows], dtype)

    def per_row(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(counts, dim=0)

    truncated = per_row(torch.tensor([episode.truncated for episode in episodes]))
    prompt_ids, prompt_lengths = packed("prompt_ids", torch.int32)
    response_ids, response_lengths = packed("response_ids", torch.int32)
    sampled = trained_on = torch.ones(len(response_ids), dtype=torch.bool)
    if any(len(row.turns) > 1 for row in rows):
        sampled = trained_on = packed("mask", torch.bool)[0]
    if mask_truncated:
        trained_on = sampled & ~truncated.repeat_interleave(response_lengths)
    return Batch(
        prompt_lengths=prompt_lengths,
        response_lengths=response_lengths,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        sampled=sampled,
        rollout_log_probs=packed("log_probs", torch.float32)[0],
        group=per_row(torch.arange(len(groups)).repeat_interleave(sizes)),
        position=per_row(torch.tensor([episode.position for episode in episodes])),
        sample=per_row(torch.tensor([episode.sample for episode in episodes])),
        episode=None if len(rows) == len(episodes) else per_row(torch.arange(len(episodes))),
        rewards=per_row(torch.tensor([score.value for score in scores])),
        reward_parts=per_row(torch.tensor(components)) if reward_keys else None,
        greedy_rewards=None if greedy is None else per_row(torch.tensor(greedy).repeat_interleave(sizes)),
        truncated=truncated,
        response_mask=trained_on,
        token_rewards=_token_rewards(scores, rows_of),
        staleness=None if version is None else version - packed("versions", torch.int32)[0],
        carried=_carried(rows),
    )


def _carried(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """Return, for all rows, each field that at least one row has."""
    none = {name: value[:0] for row in rows for name, value in row.carried.items()}
    if not none:
        return {}

    def absent(row: Row) -> dict[str, np.ndarray]:
        return joined([none], [len(row.prompt_ids)], [len(row.response_ids)])

    filled = [row.carried if row.carried.keys() == none.keys() else {**absent(row), **row.carried} for row in rows]
    counts = {declared(name).lengths: torch.tensor([len(row[name]) for row in filled]) for name in none}
    counts.pop("", None)
    return {name: torch.from_numpy(np.concatenate([row[name] for row in filled])) for name in none} | counts


def _token_rewards(scores: Sequence[Score], rows_of: Sequence[Sequence[Row]]) -> torch.Tensor | None:
    """Return the reward of each token of the episodes' rows; None if every score belongs to the last token."""
    if all(score.token_rewards is None for score in scores):
        return None
    lengths = [sum(len(row.response_ids) for row in episode_rows) for episode_rows in rows_of]
    pairs = zip(scores, lengths, strict=True)
    spread = [score.token_rewards or [0.0] * (length - 1) + [required(score.value)] for score, length in pairs]
    return pack(spread, torch.float32)[0]


# -- dynamic sampling --------------------------------------------------------------------------------------------------


class NoSignal(RuntimeError):
    """A step has drawn its maximum number of prompts, and the responses differ for too few of them."""

    code = "no-signal"


@dataclass(frozen=True)
class GroupFilter:
    """The choice of groups with a signal; a step may draw `max_batches` times; 0: up to one pass over the data.

    `metric` is "score" (verl's seq_reward and seq_final_reward mean the same here) or a key of the reward's dict.
    `draw_size` prompts are drawn at a time; None: first the wanted number, then the number that is probably missing.
    At the end of its draws a step trains on the groups kept, if there are at least `least`.
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
    """The groups that a step has drawn so far, and in `usable` those to train on.

    The step needs `needed` groups. The run has `left` prompts from here on, a pass over the data has `data_size`.
    """

    group_filter: GroupFilter | None
    needed: int
    left: int
    data_size: int
    prompts: int = 0
    rounds: int = 0
    groups: list[list[Episode]] = field(default_factory=list)
    usable: list[list[Episode]] = field(default_factory=list)

    def add(self, prompts: int, groups: Sequence[list[Episode]]) -> None:
        """Add one draw: the number of its prompts, and their groups."""
        self.rounds += 1
        self.prompts += prompts
        self.groups += groups
        self.usable += [group for group in groups if self.group_filter is None or self.group_filter.has_signal(group)]

    def next_size(self) -> int:
        """Return how many prompts to draw next; 0 if the step is full or the run has no further prompts.

        Raises NoSignal if the step may draw no more and has too few groups to be trained on.
        """
        if self.group_filter is None:
            return 0 if self.rounds else self.needed
        left, limit = self.left - self.prompts, self.group_filter.max_batches
        if not self.rounds:
            return min(self.group_filter.draw_size or self.needed, left)
        if len(self.usable) >= self.needed or (self.usable and not left):
            return 0
        allowed = left if limit > 0 else min(left, self.data_size - self.prompts)
        if allowed <= 0 or self.rounds == limit:
            if len(self.usable) < self.group_filter.least:
                raise NoSignal(self._diagnosis(self.group_filter))
            logger.warning("%s. This step is trained on the groups found", self._diagnosis(self.group_filter))
            return 0
        # The number that will probably fill the step, given the share kept so far.
        missing = self.needed - len(self.usable)
        likely = min(math.ceil(missing * self.prompts / len(self.usable)), self.needed) if self.usable else self.needed
        size = min(self.group_filter.draw_size or likely, allowed)
        progress = (len(self.usable), self.needed, self.prompts, size)
        logger.info("dynamic sampling: %d of %d groups after %d prompts; drawing %d more", *progress)
        return size

    def metrics(self) -> dict[str, float]:
        if self.group_filter is None:
            return {}
        return {
            "train/num_gen_batches": self.rounds,
            "sampling/groups_drawn": len(self.groups),
            "sampling/groups_without_signal": len(self.groups) - len(self.usable),
            "sampling/groups_left_out": max(len(self.usable) - self.needed, 0),
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
            f"dynamic sampling found {len(self.usable)} of {self.needed} groups in {self.rounds} draws ({bound}): "
            f"{len(flat)} of the {len(self.groups)} groups drawn had no signal, {split}; use data of other difficulty, "
            f"raise actor_rollout_ref.rollout.n (more responses per prompt)"
            f"{f', raise {LIMIT_KEY}' if at_limit else ''} or set algorithm.filter_groups.enable=false"
        )

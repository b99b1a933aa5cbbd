"""Groups: the scored episodes of one prompt, and how they become rows of a batch. Knows neither engines nor data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby

import torch

from hybridrl.config.findings import ConfigError
from hybridrl.core.batch import Batch, pack
from hybridrl.core.experience.trajectory import Episode, Row
from hybridrl.core.required import required
from hybridrl.rewards.score import Score

COMPONENTS_KEY = "algorithm.gdpo_reward_keys"


@dataclass(frozen=True)
class PromptGroup:
    """The episodes of one prompt that have a score; `position` is the prompt's place in the run's order.

    `greedy` is the score of the prompt's greedy response, if one was sampled.
    """

    position: int
    episodes: list[Episode]
    greedy: float | None = None


def group_by_prompt(episodes: Sequence[Episode]) -> list[PromptGroup]:
    """Return sorted episodes by prompt, without those that have no score; a prompt that has none left is no group."""
    scored = [episode for episode in episodes if episode.score.value is not None]
    by_prompt = groupby(scored, key=lambda episode: episode.position)
    return [PromptGroup(position, list(members)) for position, members in by_prompt]


def reward_component(score: Score, name: str, key: str) -> float:
    """Return the number that the reward gave under `name`, which the configuration's `key` asks for; ConfigError if it
    gave none.

    A fault of the grader that counts as a score of 0 has no components: each counts as 0 as well.
    """
    if score.fault is not None and score.value is not None:
        return score.value
    value = score.extras.get(name)
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    given = f"gave {value!r:.80}" if name in score.extras else "gave nothing"
    raise ConfigError(
        f'{key}: the reward {given} under "{name}" where a number is needed; its keys are {", ".join(score.extras)}',
        fix=f'name one of these, or make the reward function return "{name}" in its dict for every response',
    )


def to_batch(
    groups: Sequence[PromptGroup],
    reward_keys: Sequence[str] = (),
    *,
    mask_truncated: bool = False,
    version: int | None = None,
) -> Batch:
    """Return the groups as packed rows, numbered in their order, with the reward components named by `reward_keys`.

    An episode is one row, or several next to each other where its context was replaced. With `mask_truncated` no token
    of an episode cut by a length limit is trained on. `version` is that of the weights that the step starts with, if
    tokens may have been sampled with others.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    rows_of = [episode.trajectory.rows() for episode in episodes]
    rows, scores = list(chain.from_iterable(rows_of)), [episode.score for episode in episodes]
    counts = torch.tensor([len(some) for some in rows_of])
    sizes = torch.tensor([len(group.episodes) for group in groups])
    greedy = [group.greedy for group in groups]
    components = [[reward_component(score, name, COMPONENTS_KEY) for name in reward_keys] for score in scores]
    packed = _packed(rows)

    def per_row(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(counts, dim=0)

    truncated = per_row(torch.tensor([episode.truncated for episode in episodes]))
    staleness = None
    if version is not None:
        versions, _ = pack([row.versions for row in rows], torch.int32)
        staleness = version - versions
    trained_on = ~truncated if mask_truncated else torch.ones_like(truncated)
    return Batch(
        **packed,
        group=per_row(torch.arange(len(groups)).repeat_interleave(sizes)),
        position=per_row(torch.tensor([group.position for group in groups]).repeat_interleave(sizes)),
        sample=per_row(torch.tensor([episode.sample for episode in episodes])),
        episode=None if len(rows) == len(episodes) else per_row(torch.arange(len(episodes))),
        rewards=per_row(torch.tensor([score.value for score in scores])),
        reward_parts=per_row(torch.tensor(components)) if reward_keys else None,
        greedy_rewards=None if None in greedy else per_row(torch.tensor(greedy).repeat_interleave(sizes)),
        truncated=truncated,
        response_mask=packed["sampled"] & trained_on.repeat_interleave(packed["response_lengths"]),
        token_rewards=_token_rewards(scores, rows_of),
        staleness=staleness,
    )


def _packed(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """Return the fields of tokens, each with those of all rows behind one another."""
    prompt_ids, prompt_lengths = pack([row.prompt_ids for row in rows], torch.int32)
    response_ids, response_lengths = pack([row.response_ids for row in rows], torch.int32)
    log_probs, _ = pack([row.log_probs for row in rows], torch.float32)
    sampled, _ = pack([row.mask for row in rows], torch.bool)
    lengths = {"prompt_lengths": prompt_lengths, "response_lengths": response_lengths}
    ids = {"prompt_ids": prompt_ids, "response_ids": response_ids}
    return lengths | ids | {"sampled": sampled, "rollout_log_probs": log_probs}


def _token_rewards(scores: Sequence[Score], rows_of: Sequence[Sequence[Row]]) -> torch.Tensor | None:
    """Return the reward of each token of the episodes' rows; None if every score belongs to the last token."""
    if all(score.token_rewards is None for score in scores):
        return None
    lengths = [sum(len(row.response_ids) for row in some) for some in rows_of]
    pairs = zip(scores, lengths, strict=True)
    spread = [score.token_rewards or [0.0] * (length - 1) + [required(score.value)] for score, length in pairs]
    return pack(spread, torch.float32)[0]

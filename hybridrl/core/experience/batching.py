"""Groups: the scored episodes of one prompt, and how they become rows of a batch. Knows neither engines nor data."""

import math
from collections.abc import Sequence
from itertools import chain, groupby

import torch

from hybridrl.config.findings import ConfigError
from hybridrl.core.batch import Batch, pack
from hybridrl.core.experience.trajectory import Episode, Row
from hybridrl.core.required import required
from hybridrl.rewards.score import Score

COMPONENTS_KEY = "algorithm.gdpo_reward_keys"


def group_by_prompt(episodes: Sequence[Episode]) -> list[list[Episode]]:
    """Return sorted episodes by prompt, without those that have no score; a prompt that has none left is no group."""
    scored = [episode for episode in episodes if episode.score.value is not None]
    return [list(group) for _, group in groupby(scored, key=lambda episode: episode.position)]


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
    groups: Sequence[Sequence[Episode]],
    reward_keys: Sequence[str] = (),
    *,
    greedy: Sequence[float] | None = None,
    mask_truncated: bool = False,
    version: int | None = None,
) -> Batch:
    """Return the groups as packed rows, numbered in their order, with the reward components named by `reward_keys`, and
    the score of each prompt's `greedy` response, if it was sampled.

    An episode is one row, or several next to each other where its context was replaced. With `mask_truncated` no token
    of an episode cut by a length limit is trained on. `version` is that of the weights that the step starts with, if
    tokens may have been sampled with others.
    """
    episodes = [episode for group in groups for episode in group]
    rows_of = [episode.trajectory.rows() for episode in episodes]
    rows, scores = list(chain.from_iterable(rows_of)), [episode.score for episode in episodes]
    counts = torch.tensor([len(some) for some in rows_of])
    sizes = torch.tensor([len(group) for group in groups])
    components = [[reward_component(score, name, COMPONENTS_KEY) for name in reward_keys] for score in scores]

    def packed(field: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return pack([vars(row)[field] for row in rows], dtype)

    def per_row(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(counts, dim=0)

    truncated = per_row(torch.tensor([episode.truncated for episode in episodes]))
    trained_on = ~truncated if mask_truncated else torch.ones_like(truncated)
    prompt_ids, prompt_lengths = packed("prompt_ids", torch.int32)
    response_ids, response_lengths = packed("response_ids", torch.int32)
    sampled, _ = packed("mask", torch.bool)
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
        response_mask=sampled & trained_on.repeat_interleave(response_lengths),
        token_rewards=_token_rewards(scores, rows_of),
        staleness=None if version is None else version - packed("versions", torch.int32)[0],
    )


def _token_rewards(scores: Sequence[Score], rows_of: Sequence[Sequence[Row]]) -> torch.Tensor | None:
    """Return the reward of each token of the episodes' rows; None if every score belongs to the last token."""
    if all(score.token_rewards is None for score in scores):
        return None
    lengths = [sum(len(row.response_ids) for row in some) for some in rows_of]
    pairs = zip(scores, lengths, strict=True)
    spread = [score.token_rewards or [0.0] * (length - 1) + [required(score.value)] for score, length in pairs]
    return pack(spread, torch.float32)[0]

"""Groups: the scored answers to one prompt, and how they become rows of a batch. Knows neither engines nor data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from hybridrl.batch import Batch, pack
from hybridrl.config import ConfigError
from hybridrl.experience.episodes import Sample
from hybridrl.rewards.score import Score

PARTS_KEY = "algorithm.gdpo_reward_keys"


@dataclass(frozen=True)
class PromptGroup:
    """The answers to one prompt that have a score; `position` is the prompt's place in the run's order.

    `greedy` is the score of the prompt's greedy answer, where one was asked for.
    """

    position: int
    samples: list[Sample]
    greedy: float | None = None


def in_groups(samples: Sequence[Sample], positions: Sequence[int]) -> list[PromptGroup]:
    """Sorted samples by prompt, less those without a score; a prompt that has none left is no group."""
    scored = [sample for sample in samples if sample.score.value is not None]
    by_prompt = groupby(scored, key=lambda sample: sample.completion.prompt)
    return [PromptGroup(positions[prompt], list(members)) for prompt, members in by_prompt]


def reward_part(score: Score, name: str, key: str) -> float:
    """What the reward gave under `name`, for the sake of the configuration's `key`; ConfigError where it is no number.

    A grader's fault that counts as a score of 0 has no parts: each counts as that 0.
    """
    if score.fault is not None and score.value is not None:
        return score.value
    value = score.extras.get(name)
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    found = f"gave {value!r:.80}" if name in score.extras else "gave nothing"
    raise ConfigError(
        f'{key}: the reward {found} under "{name}" where a number is needed; its keys are {", ".join(score.extras)}: '
        f'name one of these, or have the reward function return "{name}" in its dict for every answer'
    )


def to_batch(groups: Sequence[PromptGroup], reward_keys: Sequence[str] = (), *, mask_truncated: bool = False) -> Batch:
    """Groups as packed rows, numbered in their order, with the parts of the reward named by `reward_keys`.

    With `mask_truncated` no token of an answer cut by the length limit is learnt from.
    """
    samples = [sample for group in groups for sample in group.samples]
    scores = [sample.score for sample in samples]
    sizes = torch.tensor([len(group.samples) for group in groups])
    greedy = [group.greedy for group in groups]
    parts = [[reward_part(score, name, PARTS_KEY) for name in reward_keys] for score in scores]
    prompt_ids, prompt_lengths = pack([sample.prompt.ids for sample in samples], torch.int32)
    response_ids, response_lengths = pack([sample.completion.token_ids for sample in samples], torch.int32)
    log_probs, _ = pack([sample.completion.log_probs for sample in samples], torch.float32)
    truncated = torch.tensor([sample.completion.truncated for sample in samples])
    learnt = ~truncated if mask_truncated else torch.ones_like(truncated)
    return Batch(
        prompt_lengths=prompt_lengths,
        response_lengths=response_lengths,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        group=torch.arange(len(groups)).repeat_interleave(sizes),
        position=torch.tensor([group.position for group in groups]).repeat_interleave(sizes),
        sample=torch.tensor([sample.number for sample in samples]),
        rewards=torch.tensor([score.value for score in scores]),
        reward_parts=torch.tensor(parts) if reward_keys else None,
        greedy_rewards=None if None in greedy else torch.tensor(greedy).repeat_interleave(sizes),
        truncated=truncated,
        response_mask=learnt.repeat_interleave(response_lengths),
        rollout_log_probs=log_probs,
        token_rewards=_token_rewards(scores, response_lengths.tolist()),
    )


def _token_rewards(scores: Sequence[Score], lengths: Sequence[int]) -> Tensor | None:
    """The rewards of all response tokens where any answer has its own; None: each score is its last token's."""
    if all(score.token_rewards is None for score in scores):
        return None
    rows = [
        score.token_rewards or [0.0] * (length - 1) + [score.value]
        for score, length in zip(scores, lengths, strict=True)
    ]
    return pack(rows, torch.float32)[0]

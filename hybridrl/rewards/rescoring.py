"""Scores stored texts, and texts that are made up for a trial, as a run scores its responses.

The doctor, the trial of a reward and evaluations choose the texts and describe the scores.
"""

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from hybridrl.config.schema_parts import RewardConfig
from hybridrl.required import required
from hybridrl.rewards.pool import ScorerPool
from hybridrl.rewards.score import WRITTEN, Score, ScoringRequest, Shaping


class Rescorer:
    """Scores texts in processes of this machine; what the reward prints goes to `log`. `tokenizer` encodes texts for a
    reward that reads token ids."""

    def __init__(
        self,
        reward: RewardConfig,
        data_sources: Collection[str],
        log: Path | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.pool, self.tokenizer = ScorerPool(reward, log, data_sources), tokenizer
        self.shaping = Shaping.of(reward)

    def submit(self, requests: list[ScoringRequest], groups: Sequence[Hashable] | None = None) -> list[Future[Score]]:
        """Return one future per request, with the score before it is shaped. With the manager group, requests that are
        equal in `groups`, by default those with the same prompt, are scored in one call."""
        if self.tokenizer is not None and self.pool.takes_tokens:
            texts = [required(request.solution) for request in requests]
            ids = [response_ids(text, self.tokenizer) for text in texts]
            requests = [replace(request, response_ids=each) for request, each in zip(requests, ids, strict=True)]
        if self.pool.per != "group":
            return self.pool.submit(requests)
        groups = groups or [repr((each.data_source, each.prompt, each.ground_truth)) for each in requests]
        places = defaultdict[Hashable, list[int]](list)
        for place, group in enumerate(groups):
            places[group].append(place)
        futures = {}
        for members in places.values():
            submitted = self.pool.submit([requests[place] for place in members])
            futures |= dict(zip(members, submitted, strict=True))
        return [futures[place] for place in range(len(requests))]

    def rescore(
        self, requests: list[ScoringRequest], lengths: Sequence[int], groups: Sequence[Hashable] | None = None
    ) -> Iterator[Score]:
        """Yield the shaped scores of responses of these lengths in tokens, in order; `groups` as in `submit`."""
        for future, length in zip(self.submit(requests, groups), lengths, strict=True):
            yield self.shaping.shaped(future.result(), length)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()


def response_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a complete response."""
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def conversation_facts(episode: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run adds to `extra_info` for a conversation, from its messages, turns and reason of stopping as
    they are stored; empty for a single response."""
    messages, turns = episode.get("messages"), episode.get("turns")
    if not messages or not turns:
        return {}
    calls = [call for turn in turns for call in turn.get("calls") or []]
    written = [str(message.get("content") or "") for message in messages if message.get("role") == "assistant"]
    return {
        WRITTEN: "\n".join(written[-len(turns) :]),
        "num_turns": len(turns),
        "turn_scores": [turn["reward"] for turn in turns if turn.get("reward") is not None],
        "tool_rewards": [call["reward"] for call in calls if call.get("reward") is not None],
        "messages": messages,
        "stop": episode.get("stop"),
    }

"""Episodes: responses to prompts with their scores. Knows neither the order of prompts nor what is trained on.

Responses are scored while others are still being sampled. Episodes are returned in the order of (prompt, sample), so
that the order in which they happened to finish changes nothing.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from hybridrl.data.prompts import Prompt
from hybridrl.experience.spool import Spool
from hybridrl.rewards.pool import ScorerPool
from hybridrl.rewards.score import Score, ScoringRequest, Shaping
from hybridrl.rollout import Completion, Request, RolloutClient, Sampling, request_seed


@dataclass(frozen=True)
class Turn:
    """One call of the policy. Token ids that the engine sampled are never encoded again.

    `observed` are the tokens that the context grew by before the call: in the first turn the prompt. `stop` is "stop"
    or, if the response was truncated, "length".
    """

    observed: Sequence[int]
    sampled: np.ndarray  # [T] int64
    log_probs: np.ndarray  # [T] float32, as sampled
    versions: np.ndarray | int  # the weight version of each token [T], or of all
    stop: str

    @staticmethod
    def of(observed: Sequence[int], completion: Completion) -> "Turn":
        stop = "length" if completion.truncated else "stop"
        return Turn(observed, completion.token_ids, completion.log_probs, completion.versions, stop)


@dataclass(frozen=True)
class Row:
    """One row of a batch. `mask` is true for the tokens that the policy sampled; others have log-prob 0."""

    prompt_ids: Sequence[int]
    response_ids: np.ndarray  # [T] int64
    log_probs: np.ndarray  # [T] float32
    mask: np.ndarray  # [T] bool


@dataclass(frozen=True)
class Episode:
    """All turns from one prompt to the score; a single response is an episode of one turn.

    `group` numbers the prompts of one call of the runner, `sample` the episodes of a prompt; `text` is the decoded
    response.
    """

    prompt: Prompt
    group: int
    sample: int
    turns: list[Turn]
    text: str
    score: Score

    @property
    def stop(self) -> str:
        return self.turns[-1].stop

    @property
    def sampled_tokens(self) -> int:
        return sum(len(turn.sampled) for turn in self.turns)

    def row(self) -> Row:
        """Return the episode as one row: the first prompt, then all that was sampled and observed after it."""
        first, *others = self.turns
        ids, log_probs, mask = [first.sampled], [first.log_probs], [np.ones(len(first.sampled), dtype=bool)]
        for turn in others:
            observed = len(turn.observed)
            ids += [np.asarray(turn.observed, dtype=np.int64), turn.sampled]
            log_probs += [np.zeros(observed, dtype=np.float32), turn.log_probs]
            mask += [np.zeros(observed, dtype=bool), np.ones(len(turn.sampled), dtype=bool)]
        return Row(first.observed, np.concatenate(ids), np.concatenate(log_probs), np.concatenate(mask))


class EpisodeRunner:
    """Runs episodes of one turn: samples responses through the client and has them decoded and scored."""

    def __init__(self, client: RolloutClient, scorers: ScorerPool, seed: int, shaping: Shaping | None = None) -> None:
        self.client, self.scorers, self.seed, self.shaping = client, scorers, seed, shaping or Shaping()

    def run(
        self,
        prompts: Sequence[Prompt],
        count: int,
        sampling: Sampling,
        seed_keys: Sequence[int | str],
        spool: Spool | None = None,
    ) -> tuple[list[Episode], dict[str, float]]:
        """Return `count` scored episodes per prompt, in order, and the seconds it took.

        Each seed derives from the prompt's seed key, one per prompt, and the number of the sample. What the spool has
        is not sampled again, and the rest is added to it.
        """
        requests = [
            Request(index, sample, prompt.ids, request_seed(self.seed, seed_keys[index], sample), sampling)
            for index, prompt in enumerate(prompts)
            for sample in range(count)
        ]
        return asyncio.run(self._run(prompts, requests, spool))

    async def _run(
        self, prompts: Sequence[Prompt], requests: Sequence[Request], spool: Spool | None
    ) -> tuple[list[Episode], dict[str, float]]:
        began = time.monotonic()
        spooled = spool.find(requests) if spool else {}
        scored = {index: one.score for index, one in spooled.items() if one.score and not self.scorers.in_one_call}
        responses = [(index, spooled[index].completion) for index in scored]
        scores = [_resolved(score) for score in scored.values()]

        def submit(finished: list[tuple[int, Completion]]) -> list[Future[Score]]:
            pairs = [(prompts[requests[index].prompt], completion) for index, completion in finished]
            futures = self.scorers.submit(
                [ScoringRequest(p.data_source, None, p.ground_truth, p.extra_info, c.token_ids) for p, c in pairs]
            )
            if spool:
                for (index, completion), future in zip(finished, futures, strict=True):
                    spool.add(requests[index], completion, future)
            return futures

        unscored = {index: one.completion for index, one in spooled.items() if index not in scored}
        async for finished in self._finished(requests, unscored, without=scored.keys()):
            responses += finished
            if not self.scorers.in_one_call:
                scores += submit(finished)
        generated = time.monotonic()
        if self.scorers.in_one_call:
            responses.sort(key=lambda response: response[0])
            scores = submit(responses)
        episodes = [
            (index, self._episode(prompts[requests[index].prompt], requests[index], completion, score.result()))
            for (index, completion), score in zip(responses, scores, strict=True)
        ]
        seconds = {"timing_s/gen": generated - began, "timing_s/reward": time.monotonic() - generated}
        return [episode for _, episode in sorted(episodes, key=lambda item: item[0])], seconds

    async def _finished(
        self, requests: Sequence[Request], known: Mapping[int, Completion], without: Collection[int]
    ) -> AsyncIterator[list[tuple[int, Completion]]]:
        """Yield the responses with the indices of their requests: those that are known, then the others."""
        if known:
            yield list(known.items())
        if missing := [index for index in range(len(requests)) if index not in known and index not in without]:
            async for finished in self.client.stream([requests[index] for index in missing]):
                yield [(missing[place], completion) for place, completion in finished]

    def _episode(self, prompt: Prompt, request: Request, completion: Completion, score: Score) -> Episode:
        """Return the episode with the shaped score; a number of token rewards other than that of tokens is a fault of
        the grader."""
        text, length = score.text or "", len(completion.token_ids)
        if score.token_rewards is not None and len(score.token_rewards) != length:
            detail = f"returned {len(score.token_rewards)} token_rewards for a response of {length} tokens"
            score = Score(None, fault="type", detail=detail)
        turn = Turn.of(request.prompt_ids, completion)
        return Episode(prompt, request.prompt, request.sample, [turn], text, self.shaping.shaped(score, length))


def _resolved(score: Score) -> Future[Score]:
    future: Future[Score] = Future()
    future.set_result(score)
    return future

"""Answers to prompts with their scores. Knows neither the order of prompts nor what is learnt from the answers.

Answers are scored while others are still being sampled. They are sorted by (prompt, sample) at the end, so that the
order in which they happened to finish changes nothing.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from hybridrl.data.prompts import Prompt
from hybridrl.rewards.overlong import OverlongPenalty
from hybridrl.rewards.pool import ScorerPool
from hybridrl.rewards.score import Answer, Score
from hybridrl.rollout import Completion, Request, RolloutPool, Sampling, request_seed


@dataclass(frozen=True)
class Sample:
    """One answer to one prompt with its verdict; `number` counts the answers to that prompt."""

    prompt: Prompt
    number: int
    completion: Completion
    text: str
    score: Score


class Respondent:
    """Answers prompts with the rollout engines and has the answers scored."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        scorers: ScorerPool,
        seed: int,
        overlong: OverlongPenalty | None = None,
    ) -> None:
        self.tokenizer, self.scorers, self.seed, self.overlong = tokenizer, scorers, seed, overlong

    def respond(
        self,
        pool: RolloutPool,
        prompts: Sequence[Prompt],
        count: int,
        sampling: Sampling,
        place: Sequence[int | str],
    ) -> tuple[list[Sample], dict[str, float]]:
        """`count` scored answers to each prompt, in order, and the seconds it took.

        `place` names the prompts' draw: one value a prompt, from which, with the sample's number, its seed derives.
        """
        began = time.monotonic()
        requests = [
            Request(index, number, prompt.ids, request_seed(self.seed, place[index], number))
            for index, prompt in enumerate(prompts)
            for number in range(count)
        ]
        found: dict[tuple[int, int], tuple[Completion, str, Future[Score]]] = {}
        for completions in pool.generate(requests, sampling):
            texts = self.tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
            answers = [self._answer(prompts[c.prompt], text) for c, text in zip(completions, texts, strict=True)]
            for completion, text, score in zip(completions, texts, self.scorers.submit(answers), strict=True):
                found[completion.prompt, completion.sample] = (completion, text, score)
        generated = time.monotonic()
        samples = [
            Sample(prompts[index], number, completion, text, self._shaped(score.result(), completion))
            for (index, number), (completion, text, score) in sorted(found.items(), key=lambda item: item[0])
        ]
        return samples, {"timing_s/gen": generated - began, "timing_s/reward": time.monotonic() - generated}

    def _answer(self, prompt: Prompt, text: str) -> Answer:
        return Answer(prompt.data_source, text, prompt.ground_truth, prompt.extra_info)

    def _shaped(self, score: Score, completion: Completion) -> Score:
        return self.overlong.shaped(score, len(completion.token_ids)) if self.overlong else score

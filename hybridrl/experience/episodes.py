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
from hybridrl.rewards.pool import ScorerPool
from hybridrl.rewards.score import Answer, Score
from hybridrl.rewards.shaping import Shaping
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
        shaping: Shaping | None = None,
    ) -> None:
        self.tokenizer, self.scorers, self.seed, self.shaping = tokenizer, scorers, seed, shaping or Shaping()

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
        answered: list[tuple[Completion, Answer]] = []
        scores: list[Future[Score]] = []
        for completions in pool.generate(requests, sampling):
            texts = self.tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
            answers = [self._answer(prompts[c.prompt], c, text) for c, text in zip(completions, texts, strict=True)]
            answered += zip(completions, answers, strict=True)
            if not self.scorers.in_one_call:
                scores += self.scorers.submit(answers)
        generated = time.monotonic()
        if self.scorers.in_one_call:
            answered.sort(key=lambda item: (item[0].prompt, item[0].sample))
            scores = self.scorers.submit([answer for _, answer in answered])
        samples = [
            Sample(
                prompts[completion.prompt],
                completion.sample,
                completion,
                answer.solution,
                self._final(score, completion),
            )
            for (completion, answer), score in zip(answered, scores, strict=True)
        ]
        samples.sort(key=lambda sample: (sample.completion.prompt, sample.number))
        return samples, {"timing_s/gen": generated - began, "timing_s/reward": time.monotonic() - generated}

    def _answer(self, prompt: Prompt, completion: Completion, text: str) -> Answer:
        tokens = list(completion.token_ids) if self.scorers.takes_tokens else None
        return Answer(prompt.data_source, text, prompt.ground_truth, prompt.extra_info, tokens)

    def _final(self, found: Future[Score], completion: Completion) -> Score:
        """The score when it is there, shaped; rewards that are not one a token are the grader's fault."""
        score, length = found.result(), len(completion.token_ids)
        if score.token_rewards is not None and len(score.token_rewards) != length:
            told = f"returned {len(score.token_rewards)} token_rewards for an answer of {length} tokens"
            return Score(None, fault="type", detail=told)
        return self.shaping.shaped(score, length)

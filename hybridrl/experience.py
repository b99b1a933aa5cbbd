"""Experience: prompts -> answers -> scores. Owns the order of prompts, the rollout and the rewards of a step.

Answers are scored while others are still being sampled. They are sorted by (prompt, sample) at the end, so that the
order in which they happened to finish changes nothing.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from hybridrl.batch import Batch, pack
from hybridrl.data.order import PromptOrder
from hybridrl.data.prompts import Prompt, PromptDataset
from hybridrl.rewards.faults import FaultGuard
from hybridrl.rewards.pool import ScorerPool
from hybridrl.rewards.score import Answer, Score
from hybridrl.rollout import Completion, Request, RolloutPool, Sampling, request_seed


class NothingToLearnFrom(RuntimeError):
    """A step in which no answer at all could be scored."""


@dataclass(frozen=True)
class Sample:
    """One answer to one prompt with its verdict; `number` counts the answers to that prompt."""

    prompt: Prompt
    number: int
    completion: Completion
    text: str
    score: Score


@dataclass(frozen=True)
class Collected:
    """A step's experience: the rows to learn from, every sample behind them, and what happened on the way."""

    batch: Batch
    samples: list[Sample]
    metrics: dict[str, float]


class Respondent:
    """Answers prompts with the rollout engines and has the answers scored."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, scorers: ScorerPool, seed: int) -> None:
        self.tokenizer, self.scorers, self.seed = tokenizer, scorers, seed

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
            Sample(prompts[index], number, completion, text, score.result())
            for (index, number), (completion, text, score) in sorted(found.items(), key=lambda item: item[0])
        ]
        return samples, {"timing_s/gen": generated - began, "timing_s/reward": time.monotonic() - generated}

    def _answer(self, prompt: Prompt, text: str) -> Answer:
        return Answer(prompt.data_source, text, prompt.ground_truth, prompt.extra_info)


class Experience:
    """The samples of each training step, in the run's seeded order of prompts."""

    def __init__(
        self,
        prompts: PromptDataset,
        order: PromptOrder,
        respondent: Respondent,
        guard: FaultGuard,
        *,
        prompts_per_step: int,
        samples_per_prompt: int,
        sampling: Sampling,
    ) -> None:
        self.prompts, self.order, self.respondent, self.guard = prompts, order, respondent, guard
        self.prompts_per_step, self.samples_per_prompt, self.sampling = (
            prompts_per_step,
            samples_per_prompt,
            sampling,
        )
        self.position = 0  # prompts drawn since the run began: all there is to know of the data's state

    def collect(self, pool: RolloutPool) -> Collected:
        """Draw the next prompts, answer and score them."""
        positions = range(self.position, self.position + self.prompts_per_step)
        prompts = [self.prompts[row] for row in self.order.rows(self.position, self.prompts_per_step)]
        samples, metrics = self.respondent.respond(pool, prompts, self.samples_per_prompt, self.sampling, positions)
        faults = self.guard.check([sample.score for sample in samples])
        kept = [sample for sample in samples if sample.score.value is not None]
        if not kept:
            raise NothingToLearnFrom(
                f"none of the {len(samples)} answers could be scored ({dict(faults.by_class)}): "
                f"{samples[0].score.detail}"
            )
        self.position += self.prompts_per_step
        metrics |= faults.metrics() | {"training/epoch": (self.position - 1) // self.order.size}
        return Collected(to_batch(kept, positions.start), samples, metrics)


def to_batch(samples: Sequence[Sample], first_position: int) -> Batch:
    """Scored samples as packed rows; the answers to one prompt are one group."""
    prompt_ids, prompt_lengths = pack([sample.prompt.ids for sample in samples], torch.int64)
    response_ids, response_lengths = pack([sample.completion.token_ids for sample in samples], torch.int64)
    log_probs, _ = pack([sample.completion.log_probs for sample in samples], torch.float32)
    group = torch.tensor([sample.completion.prompt for sample in samples])
    return Batch(
        prompt_lengths=prompt_lengths,
        response_lengths=response_lengths,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        group=group,
        position=group + first_position,
        sample=torch.tensor([sample.number for sample in samples]),
        rewards=torch.tensor([sample.score.value for sample in samples]),
        truncated=torch.tensor([sample.completion.truncated for sample in samples]),
        response_mask=torch.ones(response_ids.shape, dtype=torch.bool),
        rollout_log_probs=log_probs,
    )

"""Experience: what a training step learns from. Owns the order of prompts; answers and scores are the respondent's."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hybridrl.batch import Batch
from hybridrl.data.order import Order
from hybridrl.data.prompts import PromptDataset
from hybridrl.experience.batching import PromptGroup, in_groups, to_batch
from hybridrl.experience.dynamic_sampling import Draws, GroupFilter
from hybridrl.experience.episodes import Respondent, Sample
from hybridrl.rewards.faults import FaultGuard
from hybridrl.rewards.score import Score, part_means
from hybridrl.rollout import RolloutPool, Sampling


class NothingToLearnFrom(RuntimeError):
    """A step in which no answer at all is left to learn from."""


@dataclass(frozen=True)
class Collected:
    """A step's experience: the rows to learn from, every sample drawn for them, and what happened on the way."""

    batch: Batch
    samples: list[Sample]
    metrics: dict[str, float]


class Experience:
    """The samples of each training step, in the run's seeded order of prompts.

    `group_filter` drops groups without signal and draws further prompts (DAPO); with `greedy_baseline` each prompt is
    answered greedily once more (ReMax, Li et al. 2023); `reward_keys` name the parts of the reward (GDPO);
    `mask_truncated` keeps cut answers from being learnt. The run has `prompts_in_all` prompts; None: no end.
    """

    def __init__(
        self,
        prompts: PromptDataset,
        order: Order,
        respondent: Respondent,
        guard: FaultGuard,
        *,
        prompts_per_step: int,
        samples_per_prompt: int,
        sampling: Sampling,
        group_filter: GroupFilter | None = None,
        greedy_baseline: bool = False,
        reward_keys: tuple[str, ...] = (),
        mask_truncated: bool = False,
        prompts_in_all: int | None = None,
    ) -> None:
        self.prompts, self.order, self.respondent = prompts, order, respondent
        self.guard = guard
        self.prompts_per_step, self.samples_per_prompt, self.sampling = prompts_per_step, samples_per_prompt, sampling
        self.group_filter, self.greedy_baseline = group_filter, greedy_baseline
        self.reward_keys, self.mask_truncated = reward_keys, mask_truncated
        self.prompts_in_all = sys.maxsize if prompts_in_all is None else prompts_in_all
        self.position = 0  # prompts drawn since the run began: all there is to know of the data's state

    @property
    def finished(self) -> bool:
        """Whether all prompts of the run have been drawn."""
        return self.position >= self.prompts_in_all

    @property
    def epochs(self) -> float:
        """Passes over the rows that are done."""
        return self.position / self.order.size

    def collect(self, pool: RolloutPool) -> Collected:
        """Draw the next prompts, answer and score them; what happened is told as metrics under verl's names."""
        assert not self.finished
        metrics: Counter[str] = Counter()  # sums over all that is asked in this step
        draws, samples = self._draw(pool, metrics)
        groups, scores = draws.kept[: draws.wanted], [sample.score for sample in samples]
        if self.greedy_baseline:
            groups, judged = self._with_greedy(pool, groups, metrics)
            scores += judged
        batch = to_batch(groups, self.reward_keys, mask_truncated=self.mask_truncated)
        told = draws.metrics() | self.guard.check(scores).metrics() | part_means(scores)
        if self.mask_truncated:
            told["sampling/masked_truncated"] = _masked_rows(batch)
        self.position += draws.prompts
        told["training/epoch"] = (self.position - 1) // self.order.size
        return Collected(batch, samples, dict(metrics) | told)

    def _draw(self, pool: RolloutPool, metrics: Counter[str]) -> tuple[Draws, list[Sample]]:
        """Draw until the step has its groups. Returns every sample drawn as well."""
        left = self.prompts_in_all - self.position
        draws = Draws(self.group_filter, min(self.prompts_per_step, left), left, self.order.size)
        drawn: list[Sample] = []
        while count := draws.next_size():
            start = self.position + draws.prompts
            positions = range(start, start + count)
            prompts = [self.prompts[row] for row in self.order.rows(start, count)]
            samples, seconds = self.respondent.respond(pool, prompts, self.samples_per_prompt, self.sampling, positions)
            self.guard.settle([sample.score for sample in samples])
            metrics.update(seconds)
            drawn += samples
            draws.add(count, in_groups(samples, positions))
            if not draws.groups:
                raise NothingToLearnFrom(_none_scored(drawn))
        return draws, drawn

    def _with_greedy(
        self, pool: RolloutPool, groups: Sequence[PromptGroup], metrics: Counter[str]
    ) -> tuple[list[PromptGroup], list[Score]]:
        """The groups with the score of their prompt's greedy answer, less those where it has none; and all scores."""
        prompts, positions = [group.samples[0].prompt for group in groups], [group.position for group in groups]
        sampling = replace(self.sampling, temperature=0.0, top_p=1.0, top_k=-1)
        samples, seconds = self.respondent.respond(pool, prompts, 1, sampling, positions)
        scores = [sample.score for sample in samples]
        self.guard.settle(scores)
        metrics["timing_s/gen_max"] = sum(seconds.values())
        judged = [replace(group, greedy=sample.score.value) for group, sample in zip(groups, samples, strict=True)]
        found = [group for group in judged if group.greedy is not None]
        if not found:
            raise NothingToLearnFrom(_none_scored(samples))
        return found, scores


def _none_scored(samples: Sequence[Sample]) -> str:
    faults = Counter(sample.score.fault for sample in samples)
    return f"none of the {len(samples)} answers could be scored ({dict(faults)}): {samples[0].score.detail}"


def _masked_rows(batch: Batch) -> int:
    if batch.truncated.all():
        raise NothingToLearnFrom(
            f"each of the {len(batch)} answers was cut by the length limit, and such answers are masked; "
            "raise data.max_response_length or set algorithm.mask_truncated=false"
        )
    return int(batch.truncated.sum())

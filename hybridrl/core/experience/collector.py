"""What a training step learns from: prompts in the run's order, episodes, rewards and the batch made of them."""

import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hybridrl.core.batch import Batch
from hybridrl.core.experience.batching import PromptGroup, group_by_prompt, to_batch
from hybridrl.core.experience.dynamic_sampling import Draws, GroupFilter
from hybridrl.core.experience.episodes import EpisodeRunner
from hybridrl.core.experience.spool import Spool
from hybridrl.core.experience.trajectory import Episode
from hybridrl.core.required import required
from hybridrl.core.rollout import Sampling
from hybridrl.data.order import Order
from hybridrl.data.prompts import PromptDataset
from hybridrl.rewards.score import FaultGuard, Score, component_means

UNDER_WAY = "under_way"  # groups in a checkpoint that were started and not trained on


class NothingToLearnFrom(RuntimeError):
    """A step in which no response at all is left to train on."""

    code = "nothing-to-learn-from"


@dataclass(frozen=True)
class Collected:
    """The experience of a step: the rows to train on, every episode that was run for them, and metrics."""

    batch: Batch
    samples: list[Episode]
    metrics: dict[str, float]


class Experience(Protocol):
    """Where the batches of a run come from; owns rollout, weight versions and the mode of the devices.

    After `collect` the trainers have the devices. The state is a plain dictionary, and part of every checkpoint.
    """

    finished: bool  # whether the run has no further prompts
    epochs: float  # passes over the data so far

    def collect(self, step: int) -> Collected: ...
    def problem(self) -> str: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class ModeSwitch(Protocol):
    """Gives the devices to the engines, with the weights of a version, or to the trainers."""

    @property
    def weights(self) -> str: ...
    def to_rollout(self, version: int) -> None: ...
    def to_training(self) -> None: ...


class SampledExperience:
    """What every kind of experience has that samples its prompts in the run's seeded order.

    `group_filter` drops groups without signal and draws further prompts (DAPO); `reward_keys` name the reward
    components (GDPO); `mask_truncated` excludes truncated responses from training; tokens from `vocabulary` on are
    counted, which a padded embedding has and no tokenizer. The run has `prompts_in_all` prompts; None: no end.
    """

    def __init__(
        self,
        engine: ModeSwitch,
        prompts: PromptDataset,
        order: Order,
        runner: EpisodeRunner,
        guard: FaultGuard,
        *,
        prompts_per_step: int,
        samples_per_prompt: int,
        sampling: Sampling,
        group_filter: GroupFilter | None = None,
        reward_keys: tuple[str, ...] = (),
        mask_truncated: bool = False,
        vocabulary: int | None = None,
        prompts_in_all: int | None = None,
    ) -> None:
        self.engine, self.prompts, self.order, self.runner, self.guard = engine, prompts, order, runner, guard
        self.prompts_per_step, self.samples_per_prompt, self.sampling = prompts_per_step, samples_per_prompt, sampling
        self.group_filter, self.reward_keys, self.mask_truncated = group_filter, reward_keys, mask_truncated
        self.prompts_in_all = sys.maxsize if prompts_in_all is None else prompts_in_all
        self.vocabulary = vocabulary
        self.position = 0  # prompts drawn since the run began

    @property
    def finished(self) -> bool:
        return self.position >= self.prompts_in_all

    @property
    def epochs(self) -> float:
        return self.position / self.order.size

    def problem(self) -> str:
        """Return why the last step should not be trusted; empty if it can be."""
        return "the reward function failed on too many of the step's responses" if self.guard.steps_above else ""

    def state_dict(self) -> dict[str, Any]:
        return {"prompts": self.position, "fault_steps": self.guard.steps_above}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["prompts"] + len(state.get(UNDER_WAY, ()))
        self.guard.steps_above = state["fault_steps"]

    def _batch(
        self,
        groups: Sequence[PromptGroup],
        episodes: list[Episode],
        scores: list[Score],
        version: int | None = None,
    ) -> tuple[Batch, dict[str, float]]:
        """Return the rows to train on, and metrics of all episodes and scores of the step. `version` is that of its
        weights, if tokens may have been sampled with others."""
        if not groups:
            raise NothingToLearnFrom(none_scored(episodes))
        batch = to_batch(groups, self.reward_keys, mask_truncated=self.mask_truncated, version=version)
        metrics = self.guard.check(scores) | component_means(scores) | self.runner.metrics(episodes)
        if self.mask_truncated:
            truncated = required(batch.by_episode().truncated)
            if truncated.all():
                raise NothingToLearnFrom(
                    f"each of the {len(truncated)} responses was cut by the length limit, and such responses are "
                    "masked; raise data.max_response_length or set algorithm.mask_truncated=false"
                )
            metrics["sampling/masked_truncated"] = int(truncated.sum())
        if self.vocabulary and (unknown := int((batch.response_ids[batch.written] >= self.vocabulary).sum())):
            metrics["sampling/unknown_tokens"] = unknown
        return batch, metrics


class SynchronousExperience(SampledExperience):
    """Samples each step's responses with the policy of the step before.

    With `greedy_baseline` one more response per prompt is sampled greedily (ReMax, Li et al. 2023). A `spool` keeps the
    finished responses of a step for a run that is resumed in it.
    """

    def __init__(self, *args: Any, greedy_baseline: bool = False, spool: Spool | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.greedy_baseline, self.spool = greedy_baseline, spool

    def collect(self, step: int) -> Collected:
        """Run episodes on the next prompts with the policy after `step - 1` steps; metrics have verl's names."""
        assert not self.finished
        self.engine.to_rollout(version=step - 1)
        if self.spool:
            self.spool.open(step, self.engine.weights)
        metrics: defaultdict[str, float] = defaultdict(float)  # sums over all rounds of this step
        draws, episodes = self._draw(metrics)
        groups, scores = draws.kept[: draws.wanted], [episode.score for episode in episodes]
        if self.greedy_baseline:
            groups, greedy_scores = self._with_greedy(groups, metrics)
            scores += greedy_scores
        if self.spool:
            self.spool.finish(len(scores))
        self.engine.to_training()
        batch, reported = self._batch(groups, episodes, scores)
        self.position += draws.prompts
        epoch = {"training/epoch": (self.position - 1) // self.order.size}
        return Collected(batch, episodes, dict(metrics) | draws.metrics() | reported | epoch)

    def _draw(self, metrics: defaultdict[str, float]) -> tuple[Draws, list[Episode]]:
        """Draw prompts until the step has its groups. Returns every episode that was run as well."""
        left = self.prompts_in_all - self.position
        draws = Draws(self.group_filter, min(self.prompts_per_step, left), left, self.order.size)
        episodes: list[Episode] = []
        while count := draws.next_size():
            start = self.position + draws.prompts
            positions = range(start, start + count)
            prompts = [self.prompts[row] for row in self.order.rows(start, count)]
            some, seconds = self.runner.run(prompts, self.samples_per_prompt, self.sampling, positions, self.spool)
            self.guard.apply([episode.score for episode in some])
            for name, spent in seconds.items():
                metrics[name] += spent
            episodes += some
            draws.add(count, group_by_prompt(some))
            if not draws.groups:
                raise NothingToLearnFrom(none_scored(episodes))
        return draws, episodes

    def _with_greedy(
        self, groups: Sequence[PromptGroup], metrics: defaultdict[str, float]
    ) -> tuple[list[PromptGroup], list[Score]]:
        """Add the score of each prompt's greedy response; a group whose greedy response has none is dropped. Returns
        all scores as well."""
        prompts, positions = [group.episodes[0].prompt for group in groups], [group.position for group in groups]
        sampling = replace(self.sampling, temperature=0.0, top_p=1.0, top_k=-1)
        episodes, seconds = self.runner.run(prompts, 1, sampling, positions, self.spool)
        scores = [episode.score for episode in episodes]
        self.guard.apply(scores)
        metrics["timing_s/gen_max"] = sum(seconds.values())
        scored = [
            replace(group, greedy=score.value)
            for group, score in zip(groups, scores, strict=True)
            if score.value is not None
        ]
        if not scored:
            raise NothingToLearnFrom(none_scored(episodes))
        return scored, scores


def none_scored(episodes: Sequence[Episode]) -> str:
    """Return why there is nothing to learn from these episodes: their faults."""
    faults = Counter(episode.score.fault for episode in episodes)
    return f"none of the {len(episodes)} responses could be scored ({dict(faults)}): {episodes[0].score.detail}"

"""The experience of a step: prompts in the run's order, their episodes and rewards, and the resulting batch."""

import math
import sys
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hybridrl.core.batch import Batch
from hybridrl.core.experience.batching import Draws, GroupFilter, group_by_prompt, to_batch
from hybridrl.core.experience.episodes import EpisodeRunner
from hybridrl.core.experience.responses import ResponseStore
from hybridrl.core.experience.trajectory import Episode
from hybridrl.core.pictures import picture_metrics
from hybridrl.core.rollout import Sampling
from hybridrl.data.order import Order
from hybridrl.data.prompts import PromptDataset
from hybridrl.required import required
from hybridrl.rewards.score import FaultGuard, Score, component_means, diagnosis

Groups = Sequence[list[Episode]]
Rate = Callable[[list[Episode]], list[Episode]]
PICTURES_AHEAD = 1 << 30  # bytes of the next step's pixels that are made while a step trains
IN_FLIGHT = "under_way"  # in a checkpoint: the groups that were started and not trained on


class NothingToLearnFrom(RuntimeError):
    """No response of the step is left to train on."""

    code = "nothing-to-learn-from"


@dataclass(frozen=True)
class Collected:
    """The experience of a step: the rows to train on, the episodes sampled for them, and metrics."""

    batch: Batch
    samples: list[Episode]
    metrics: dict[str, float]


class Devices(Protocol):
    """Gives the devices to the engines, with the weights of a version, or to the trainers."""

    @property
    def weights(self) -> str: ...
    def to_rollout(self, version: int) -> None: ...
    def to_training(self) -> None: ...
    def rebuild_servers(self) -> None: ...
    def take_metrics(self) -> dict[str, float]: ...


@dataclass(frozen=True)
class SamplingPlan:
    """The prompts and responses of a step, and which of them are trained on.

    `group_filter` drops groups without signal and draws further prompts (DAPO); `reward_keys` name the reward
    components (GDPO); `mask_truncated` excludes truncated responses from training; with `greedy_baseline` one more
    response per prompt is sampled greedily (ReMax, Li et al. 2023). Sampled ids >= `vocabulary`, padding rows of the
    embedding, are counted as unknown tokens. The run has `prompts_in_all` prompts.
    """

    prompts_per_step: int
    samples_per_prompt: int
    sampling: Sampling
    group_filter: GroupFilter | None = None
    reward_keys: tuple[str, ...] = ()
    mask_truncated: bool = False
    greedy_baseline: bool = False
    vocabulary: int | None = None
    prompts_in_all: int = sys.maxsize


@dataclass(eq=False)
class Experience(ABC):
    """The source of the run's batches. Prompts come in the run's seeded order. Owns rollout, weight versions and the
    mode of the devices. `store` has the responses that an earlier process has sampled. `rate` returns the episodes with
    the scores of a reward model, which computes on the trainers' devices. The state is a plain dictionary, and part of
    every checkpoint.
    """

    engine: Devices
    prompts: PromptDataset
    order: Order
    runner: EpisodeRunner
    guard: FaultGuard
    plan: SamplingPlan
    store: ResponseStore
    # Gives the rows of these groups what their teachers read; with metrics. None: they read what the policy reads.
    contexts: Callable[[Groups], tuple[Groups, dict[str, float]]] | None = field(default=None, kw_only=True)
    rate: Rate | None = field(default=None, kw_only=True)
    # Begins to read the pictures of these rows of `prompts`, up to a number of bytes.
    read_ahead: Callable[[Sequence[int], float], None] | None = field(default=None, kw_only=True)
    position: int = field(default=0, init=False)  # prompts drawn since the run began

    @abstractmethod
    def collect(self, step: int) -> Collected:
        """Return the experience of a step, sampled with the policy after `step - 1` steps or a few before. The trainers
        have the devices when it returns. Metrics have verl's names."""

    @property
    def finished(self) -> bool:
        """Whether the run has no further prompts."""
        return self.position >= self.plan.prompts_in_all

    @property
    def epochs(self) -> float:
        """Passes over the data so far."""
        return self.position / self.order.size

    def problem(self) -> str:
        """Return the reason not to trust the last step; empty if there is none."""
        return "too many of the step's responses could not be scored" if self.guard.steps_above else ""

    def state_dict(self) -> dict[str, Any]:
        return {"prompts": self.position, "fault_steps": self.guard.steps_above} | self.order.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["prompts"] + len(state.get(IN_FLIGHT, ()))
        self.guard.steps_above = state["fault_steps"]
        self.order.load_state_dict(state)

    def _read_next(self) -> None:
        """Begin to read the pictures of the next step's prompts. The order of the next epoch may not be known yet."""
        left = min(self.plan.prompts_in_all - self.position, self.order.size - self.position % self.order.size)
        if self.read_ahead is not None and left > 0:
            self.read_ahead(self.order.rows(self.position, min(self.plan.prompts_per_step, left)), PICTURES_AHEAD)

    def _rated(self, episodes: list[Episode]) -> list[Episode]:
        """Return the episodes with their final scores; with a reward model the trainers then have the devices."""
        if self.rate is not None:
            self.engine.to_training()
            episodes = self.rate(episodes)
        self.guard.apply([episode.score for episode in episodes])
        return episodes

    def _batch(
        self,
        groups: Sequence[list[Episode]],
        episodes: list[Episode],
        scores: list[Score],
        *,
        greedy: Sequence[float] | None = None,
        version: int | None = None,
    ) -> tuple[Batch, dict[str, float]]:
        """Return the rows to train on, and metrics of all episodes and scores of the step (see `to_batch`)."""
        if not groups:
            raise NothingToLearnFrom(diagnosis([episode.score for episode in episodes]))
        mask_truncated, vocabulary = self.plan.mask_truncated, self.plan.vocabulary
        groups, of_contexts = self.contexts(groups) if self.contexts else (groups, {})
        batch = to_batch(groups, self.plan.reward_keys, greedy=greedy, mask_truncated=mask_truncated, version=version)
        metrics = self.guard.check(scores) | component_means(scores) | self.runner.metrics(episodes) | of_contexts
        of_prompts = {episode.position: episode.prompt.pictures for episode in episodes}
        further = (picture for episode in episodes for picture in episode.trajectory.pictures)
        metrics |= picture_metrics([*of_prompts.values()], further)
        if mask_truncated:
            truncated = required(batch.by_episode().truncated)
            if truncated.all():
                raise NothingToLearnFrom(
                    f"each of the {len(truncated)} responses was cut by the length limit, and such responses are "
                    "masked; raise data.max_response_length or set algorithm.mask_truncated=false"
                )
            metrics["sampling/masked_truncated"] = int(truncated.sum())
        if vocabulary and (unknown := int((batch.response_ids[batch.sampled_mask] >= vocabulary).sum())):
            metrics["sampling/unknown_tokens"] = unknown
        return batch, metrics


class SynchronousExperience(Experience):
    """Samples each step's responses with the policy of the step before."""

    def collect(self, step: int) -> Collected:
        assert not self.finished
        self.engine.to_rollout(version=step - 1)
        self.store.open(step, self.engine.weights)
        metrics: defaultdict[str, float] = defaultdict(float)  # sums over all rounds of this step
        draws, episodes = self._draw(metrics)
        groups, greedy, scores = draws.usable[: draws.needed], None, [episode.score for episode in episodes]
        if self.plan.greedy_baseline:
            groups, greedy = self._with_greedy(groups, scores, metrics)
        self.store.finish(len(scores))
        self.engine.to_training()
        batch, reported = self._batch(groups, episodes, scores, greedy=greedy)
        rewards = [(each.position, each.score.value) for each in episodes if each.score.value is not None]
        reported |= self.order.observe(rewards)
        self.position += draws.prompts
        self._read_next()
        epoch = {"training/epoch": (self.position - 1) // self.order.size}
        return Collected(batch, episodes, dict(metrics) | draws.metrics() | reported | epoch)

    def _draw(self, metrics: defaultdict[str, float]) -> tuple[Draws, list[Episode]]:
        """Draw prompts until the step has its groups. Also returns all episodes that were run."""
        plan, left = self.plan, self.plan.prompts_in_all - self.position
        draws = Draws(plan.group_filter, min(plan.prompts_per_step, left), left, self.order.size)
        episodes: list[Episode] = []
        while count := draws.next_size():
            start = self.position + draws.prompts
            rows = self.order.rows(start, count)
            if self.read_ahead is not None:
                self.read_ahead(rows, math.inf)
            waiting = time.monotonic()
            prompts = [self.prompts[row] for row in rows]
            if any(prompt.pictures for prompt in prompts):
                metrics["timing_s/pictures"] += time.monotonic() - waiting
            positions = range(start, start + count)
            drawn, seconds = self.runner.run(prompts, plan.samples_per_prompt, plan.sampling, positions, self.store)
            drawn = self._rated(drawn)
            for name, spent in seconds.items():
                metrics[name] += spent
            episodes += drawn
            draws.add(count, group_by_prompt(drawn))
            if not draws.groups:
                raise NothingToLearnFrom(diagnosis([episode.score for episode in episodes]))
        return draws, episodes

    def _with_greedy(
        self, groups: Sequence[list[Episode]], scores: list[Score], metrics: defaultdict[str, float]
    ) -> tuple[list[list[Episode]], list[float]]:
        """Return the groups whose greedy response has a score, and these scores. Adds all scores to `scores`."""
        prompts, positions = [group[0].prompt for group in groups], [group[0].position for group in groups]
        sampling = replace(self.plan.sampling, temperature=0.0, top_p=1.0, top_k=-1)
        episodes, seconds = self.runner.run(prompts, 1, sampling, positions, self.store)
        values = [episode.score for episode in episodes]
        self.guard.apply(values)
        scores += values
        metrics["timing_s/gen_max"] = sum(seconds.values())
        greedy = {at: score.value for at, score in enumerate(values) if score.value is not None}
        if not greedy:
            raise NothingToLearnFrom(diagnosis(values))
        return [groups[at] for at in greedy], [*greedy.values()]

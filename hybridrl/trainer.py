"""The hall: a run of steps. A step reads as the algorithm's box in a paper; everything else is a collaborator's.

Knows no configuration, no Ray and no engine's name.
"""

from dataclasses import dataclass

from hybridrl.algorithms import Algorithm
from hybridrl.checkpoint.store import Store
from hybridrl.experience import Experience
from hybridrl.hybrid_engine import HybridEngine
from hybridrl.metrics import batch_metrics, throughput_metrics
from hybridrl.records import Records
from hybridrl.stopwatch import Stopwatch
from hybridrl.training.workers import TrainWorkers
from hybridrl.validation import Validator


@dataclass(frozen=True)
class Schedule:
    """How long a run is and what happens when. Frequencies in steps; 0 or less: not between first and last."""

    total_steps: int
    validate_every: int
    save_every: int
    validate_first: bool
    validate_only: bool

    def validates(self, step: int) -> bool:
        return step == self.total_steps or _due(step, self.validate_every)

    def saves(self, step: int) -> bool:
        """At the end too, unless saving is off (-1)."""
        return self.save_every >= 0 and (step == self.total_steps or _due(step, self.save_every))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


class Trainer:
    """Runs the steps of an algorithm over its collaborators."""

    def __init__(
        self,
        algorithm: Algorithm,
        experience: Experience,
        engine: HybridEngine,
        workers: TrainWorkers,
        validator: Validator | None,
        records: Records,
        store: Store,
        schedule: Schedule,
    ) -> None:
        self.algorithm, self.experience, self.engine, self.workers = algorithm, experience, engine, workers
        self.validator, self.records, self.store, self.schedule = validator, records, store, schedule
        self.watch = Stopwatch()

    def fit(self) -> None:
        """Train from the first step to the last, validating and saving on the way."""
        if self.validator and (self.schedule.validate_first or self.schedule.validate_only):
            self.records.log(0, self.validate(0) | self.engine.take_metrics())
        if self.schedule.validate_only:
            return
        for step in range(1, self.schedule.total_steps + 1):
            with self.watch("step"):
                metrics = self.train_step(step)
            metrics |= self.watch.take()
            metrics |= throughput_metrics(metrics, len(self.workers.group))
            if self.validator and self.schedule.validates(step):
                metrics |= self.validate(step)
            if self.schedule.saves(step):
                metrics |= self.save(step)
            self.records.log(step, metrics | self.engine.take_metrics() | {"training/global_step": step})

    def train_step(self, step: int) -> dict[str, float]:
        """One step of the algorithm: sample, score, compare, learn."""
        self.engine.to_rollout(version=step - 1)
        collected = self.experience.collect(self.engine.pool)
        self.engine.to_training()
        batch = collected.batch
        if self.workers.needs_old_log_probs or self.algorithm.penalises_reward:
            batch = self.workers.log_probs(batch)
        if self.algorithm.uses_reference:
            batch = self.workers.reference_log_probs(batch)
        with self.watch("adv"):
            batch, metrics = self.algorithm.advantages(batch)
        batch, learnt = self.workers.update_policy(batch, step)
        self.records.training_samples(step, collected.samples)
        return collected.metrics | metrics | learnt | batch_metrics(batch)

    def validate(self, step: int) -> dict[str, float]:
        """Validate the policy as it is after `step` steps."""
        assert self.validator is not None
        self.engine.to_rollout(version=step)
        samples, metrics = self.validator.validate(self.engine.pool)
        self.records.validation_samples(step, samples)
        return metrics

    def save(self, step: int) -> dict[str, float]:
        with self.watch("save_checkpoint"):
            self.engine.to_training()
            self.store.save(step, self.workers.export)
        return self.watch.take()

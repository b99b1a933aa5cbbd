"""The hall: a run of steps. A step reads as the algorithm's box in a paper; everything else is a collaborator's.

Knows no configuration, no Ray and no engine's name.
"""

from dataclasses import dataclass, replace

from hybridrl.algorithms import Algorithm
from hybridrl.algorithms.agreement import Agreement
from hybridrl.algorithms.batch_metrics import batch_metrics, mismatch_metrics, throughput_metrics
from hybridrl.batch import Batch
from hybridrl.evaluation.evaluator import Validator
from hybridrl.experience.collector import Experience
from hybridrl.experience.sample_log import Records
from hybridrl.hybrid_engine import HybridEngine
from hybridrl.run_state import RunState
from hybridrl.runtime.signals import StopRequest
from hybridrl.runtime.timer import Stopwatch
from hybridrl.saving import Save, Saver
from hybridrl.training.worker_group import TrainWorkers


@dataclass(frozen=True)
class Schedule:
    """How long a run is and what happens when. Frequencies in steps; 0 or less: not between first and last."""

    total_steps: int
    validate_every: int
    validate_first: bool
    validate_only: bool
    first_policy_update: int = 1  # before this step the critic learns alone
    refresh_reference_every: int = -1
    most_skipped_updates: int = 3  # in a row
    agreement: Agreement | None = None  # of engine and trainer; None: they are asked for different things

    def validates(self, step: int, last: bool) -> bool:
        return last or _due(step, self.validate_every)


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
        saver: Saver,
        run_state: RunState,
        schedule: Schedule,
    ) -> None:
        self.algorithm, self.experience, self.engine, self.workers = algorithm, experience, engine, workers
        self.validator, self.records, self.saver, self.schedule = validator, records, saver, schedule
        self.run_state = run_state
        self.watch = Stopwatch()

    def fit(self, done: int, start_up: dict[str, float]) -> None:
        """Train to the last step, of which `done` are, validating and saving on the way."""
        if self.validator and done == 0 and (self.schedule.validate_first or self.schedule.validate_only):
            self.records.log(0, self.validate(0) | self.engine.take_metrics())
        if self.schedule.validate_only:
            return
        with StopRequest(wait_for_step=self.saver.plan.times.ever) as stop:
            for step in range(done + 1, self.schedule.total_steps + 1):
                last = self._run_step(step, start_up if step == done + 1 and done else {})
                if stop.reason and not last:
                    self.save(step, Save.RECOVERY)
                    break
                if last:
                    break
            self.saver.finish()
        if self.saver.failed:
            raise self.saver.failed
        if stop.reason:
            raise KeyboardInterrupt(stop.reason)

    def _run_step(self, step: int, further: dict[str, float]) -> bool:
        """Train a step, validate, tell and save; returns whether it is the last."""
        epochs = self.experience.epochs
        with self.watch("step"):
            metrics = self.train_step(step)
        metrics |= self.watch.take()
        metrics |= throughput_metrics(metrics, len(self.workers.group)) | self.saver.watch.take() | further
        # Dynamic sampling may have used up the run's prompts before its steps.
        last = step == self.schedule.total_steps or self.experience.finished
        if self.validator and self.schedule.validates(step, last):
            metrics |= self.validate(step)
        # A saved step that has not been told of would be missing from the records of a run that goes on from it.
        self.run_state.note(metrics)
        self.records.log(step, metrics | self.engine.take_metrics() | {"training/global_step": step})
        self.saver.poll()
        if save := self.saver.due(step, (epochs, self.experience.epochs), last=last):
            self.save(step, save)
        return last

    def train_step(self, step: int) -> dict[str, float]:
        """One step of the algorithm: sample, score, compare, learn."""
        self.engine.to_rollout(version=step - 1)
        collected = self.experience.collect(self.engine.pool)
        self.engine.to_training()
        batch, algorithm, workers = collected.batch, self.algorithm, self.workers
        updates_policy = step >= self.schedule.first_policy_update
        if algorithm.needs_old_log_probs or (
            updates_policy and not algorithm.bypass and workers.needs_old_log_probs(batch)
        ):
            batch = workers.log_probs(batch, reference_kl=algorithm.needs_reference_kl)
            self._compare(batch)
        if algorithm.bypass:
            batch = replace(batch, old_log_probs=batch.rollout_log_probs)
        if algorithm.needs_reference_log_probs:
            batch = workers.reference_log_probs(batch)
        if algorithm.uses_critic:
            batch = workers.values(batch)
        with self.watch("adv"):
            batch, metrics = algorithm.advantages(batch)
        if algorithm.uses_critic:
            metrics |= workers.update_critic(batch, step)
        if updates_policy:
            batch, learnt = workers.update_policy(batch, step)
            metrics |= learnt
            self._compare(batch)  # of an update that found the old log-probs itself, before it is saved
        workers.stop_if_broken(self.schedule.most_skipped_updates, self.saver.store)
        if algorithm.uses_reference and _due(step, self.schedule.refresh_reference_every):
            workers.refresh_reference()
        self.records.training_samples(step, collected.samples)
        sampled = collected.batch.response_mask
        metrics |= collected.metrics | batch_metrics(batch, sampled)
        if algorithm.bypass:  # the old log-probs are the engine's own
            return metrics
        return metrics | mismatch_metrics(replace(batch, response_mask=sampled))

    def _compare(self, batch: Batch) -> None:
        """Stop where engine and trainer disagree about the sampled tokens."""
        if self.schedule.agreement is not None:
            self.schedule.agreement.check(batch)

    def validate(self, step: int) -> dict[str, float]:
        """Validate the policy as it is after `step` steps."""
        assert self.validator is not None
        self.engine.to_rollout(version=step)
        samples, metrics = self.validator.validate(self.engine.pool)
        self.records.validation_samples(step, samples)
        return metrics

    def save(self, step: int, save: Save) -> None:
        self.engine.to_training()
        self.saver.start(step, self.run_state.take(step, recovery=save is Save.RECOVERY))

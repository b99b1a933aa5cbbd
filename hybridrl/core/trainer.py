"""The training loop, and the step of reinforcement learning that it runs.

Does not depend on the configuration, Ray or a rollout engine. Asynchronous training is another `Experience` (with other
`Devices` if rollout has its own), supervised fine-tuning another `Task`; neither edits this file.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hybridrl.core.algorithms import Algorithm
from hybridrl.core.algorithms.batch_metrics import batch_metrics, mismatch_metrics, throughput_metrics
from hybridrl.core.batch import Batch
from hybridrl.core.cluster import WorkerDied
from hybridrl.core.experience.collector import Collected, Devices, Experience
from hybridrl.core.experience.evaluator import Evaluator
from hybridrl.core.experience.trajectory import Episode
from hybridrl.core.training.worker_group import TrainWorkers
from hybridrl.runtime.guard import StopRequest
from hybridrl.tracking.faults import begin_step
from hybridrl.tracking.sink import Sink, Stopwatch


class Task(Protocol):
    """The thing that the training loop trains. The defaults suit a task that has its devices to itself."""

    @property
    @abstractmethod
    def epochs(self) -> float:
        """Epochs of the training data used so far, counted from the start of the run."""

    @property
    def finished(self) -> bool:
        """Whether the run's data is used up before its last step."""
        return False

    @abstractmethod
    def train_step(self, step: int) -> dict[str, float]:
        """Train one step; returns its metrics."""

    @abstractmethod
    def validate(self, step: int) -> dict[str, float]:
        """Validate the model after `step` steps; returns metrics, empty without validation data."""

    def before_save(self) -> None:
        """Bring the devices into the state in which workers can save."""
        return

    def take_metrics(self) -> dict[str, float]:
        """Metrics collected since the last call, of training and validation together."""
        return {}

    def rebuild(self) -> None:
        """Before the next weight sync, replace processes whose memory has grown."""
        return

    def problem(self) -> str:
        """Return the reason to avoid the last step when resuming; empty if there is none."""
        return ""

    def record_diagnosis(self, step: int, *, show: bool) -> None:
        """Store the rows that the step trained on, and print a few of its samples if `show`."""
        return


class Checkpoints(Protocol):
    """Checkpointing; `failed` is the error of the last save. `due` returns the save that this step needs, or None.
    `start(None)` writes a checkpoint for resuming only."""

    failed: Exception | None
    store: Any  # the checkpoints in its `directory`; `last` returns the one to resume from, or None
    watch: Stopwatch

    @property
    def ever(self) -> bool:
        """Whether anything is saved."""

    def completed(self, step: int, metrics: dict[str, float], problem: str) -> None: ...
    def due(self, step: int, epochs: tuple[float, float], *, last: bool) -> Any: ...
    def start(self, save: Any) -> None: ...
    def poll(self) -> None: ...
    def finish(self) -> None: ...
    def rescue(self, error: Exception, prepare: Callable[[], None]) -> None: ...


class Health(Protocol):
    """Health rules for a step's metrics; `new` and `shows` refer to the step judged last."""

    new: Sequence[object]

    @property
    def shows(self) -> bool: ...
    @property
    def rebuilds(self) -> bool: ...
    def judge(self, step: int, metrics: dict[str, float]) -> dict[str, float]: ...
    def act(self) -> None: ...
    def problem(self) -> str: ...


class Samples(Protocol):
    """The record of the samples of each step."""

    def training_samples(self, step: int, episodes: Sequence[Episode], batch: Batch) -> None: ...
    def validation_samples(self, step: int, episodes: Sequence[Episode]) -> None: ...
    def record_diagnosis(self, step: int, *, show: bool) -> None: ...
    def forget(self) -> None: ...
    def flush(self) -> None: ...


@dataclass(frozen=True)
class Schedule:
    """The number of steps of a run, and when it validates. `validate_every` <= 0: only after the last step."""

    total_steps: int
    validate_every: int
    validate_first: bool = False
    validate_only: bool = False
    max_skipped_updates: int = 3  # in a row

    def validates(self, step: int, last: bool) -> bool:
        return last or _due(step, self.validate_every)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@dataclass
class Trainer:
    """The loop around a task: step, validate, log, save, stop."""

    task: Task
    workers: TrainWorkers
    tracker: Sink
    saver: Checkpoints
    schedule: Schedule
    health: Health
    watch: Stopwatch = field(default_factory=Stopwatch, init=False)

    def fit(self, done: int, start_up: dict[str, float]) -> None:
        """Train the remaining steps; `done` steps are complete. A resumed run logs `start_up` with its first step."""
        if done == 0 and self.schedule.validate_first:
            self.tracker.log(0, self.task.validate(0) | self.task.take_metrics())
        if self.schedule.validate_only:
            return
        with StopRequest(wait_for_step=self.saver.ever) as stop:
            try:
                self._run_steps(done, start_up, stop)
            except Exception as error:
                if not isinstance(error, WorkerDied):  # all ranks live, and hold the last complete step
                    self.saver.rescue(error, self.task.before_save)
                raise
            self.saver.finish()
        if self.saver.failed:
            cause = self.saver.failed.__cause__
            raise cause if isinstance(cause, WorkerDied) else self.saver.failed
        if stop.reason:
            raise KeyboardInterrupt(stop.reason)

    def _run_steps(self, done: int, start_up: dict[str, float], stop: StopRequest) -> None:
        for step in range(done + 1, self.schedule.total_steps + 1):
            epochs = self.task.epochs
            metrics = self._run_step(step, start_up if step == done + 1 and done else {})
            last, stopping = self._is_last(step), bool(stop.reason)
            problem = self.workers.problem() or self.task.problem() or self.health.problem()
            self.saver.completed(step, metrics, problem)
            store = self.saver.store
            self.workers.stop_if_broken(self.schedule.max_skipped_updates, store.directory, store.last)
            self.health.act()
            if self.health.rebuilds:
                self.task.rebuild()
            save = self.saver.due(step, (epochs, self.task.epochs), last=last)
            if save or stopping:
                self.task.before_save()
                self.saver.start(save)
            if last or stopping:
                return

    def _is_last(self, step: int) -> bool:
        return step == self.schedule.total_steps or self.task.finished

    def _run_step(self, step: int, start_up: dict[str, float]) -> dict[str, float]:
        """Run one step, then validate and log; returns its metrics."""
        begin_step(step)
        with self.watch("step"):
            metrics = self.task.train_step(step)
        metrics |= self.watch.take() | self.saver.watch.take() | start_up
        metrics |= throughput_metrics(metrics, len(self.workers.group))
        if self.schedule.validates(step, self._is_last(step)):
            metrics |= self.task.validate(step)
        metrics |= self.task.take_metrics()
        metrics |= self.health.judge(step, metrics)
        if self.health.new:
            self.task.record_diagnosis(step, show=self.health.shows)
        # Log before saving: otherwise a run resumed from this checkpoint would miss the step's metrics.
        self.tracker.log(step, metrics | {"training/global_step": step})
        self.saver.poll()
        return metrics


@dataclass
class RLTask(Task):
    """Reinforcement learning: a step samples, scores, compares and learns."""

    algorithm: Algorithm
    experience: Experience
    devices: Devices
    workers: TrainWorkers
    evaluator: Evaluator | None
    sample_log: Samples
    watch: Stopwatch = field(default_factory=Stopwatch, init=False)

    @property
    def epochs(self) -> float:
        return self.experience.epochs

    @property
    def finished(self) -> bool:
        return self.experience.finished

    def train_step(self, step: int) -> dict[str, float]:
        """Run one step of the algorithm; every line fills fields of the batch. Only `advantages` changes fields that
        are filled already: it masks rejected tokens, and subtracts a KL penalty from rewards."""
        algorithm, workers = self.algorithm, self.workers
        self.sample_log.forget()
        collected = self.experience.collect(step)
        batch = workers.old_log_probs(collected.batch, algorithm, step)  # skipped where the update computes the same
        for signal in algorithm.signals:
            batch = workers.fill(batch, signal)
        with self.watch("adv"):
            batch, metrics = algorithm.advantages(batch)
        batch, update_metrics = workers.update(batch, step)  # critic and policy, each in the steps that update it
        for name, (every, share) in algorithm.copies.items():
            if _due(step, every):
                workers.refresh(name, share)
        self.sample_log.training_samples(step, collected.samples, batch)
        return metrics | update_metrics | self.watch.take() | self._step_metrics(collected, batch)

    def _step_metrics(self, collected: Collected, batch: Batch) -> dict[str, float]:
        scored = collected.batch.response_mask  # rejection may have masked tokens since
        metrics = collected.metrics | batch_metrics(batch, scored)
        if self.algorithm.bypass:  # the old log-probs are the rollout's own
            return metrics
        return metrics | mismatch_metrics(replace(batch, response_mask=scored))

    def validate(self, step: int) -> dict[str, float]:
        if self.evaluator is None:
            return {}
        episodes, metrics = self.evaluator.evaluate(step)
        self.sample_log.validation_samples(step, episodes)
        return metrics

    def before_save(self) -> None:
        self.sample_log.flush()  # a run that resumes from this checkpoint does not sample them again
        self.devices.to_training()

    def take_metrics(self) -> dict[str, float]:
        return self.devices.take_metrics()

    def rebuild(self) -> None:
        self.devices.rebuild_servers()

    def problem(self) -> str:
        return self.experience.problem()

    def record_diagnosis(self, step: int, *, show: bool) -> None:
        self.sample_log.record_diagnosis(step, show=show)

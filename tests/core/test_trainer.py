"""The training loop and the step, over stand-ins that record what is called: no Ray, no model, no engine."""

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

from hybridrl.checkpoint.saver import Save
from hybridrl.checkpoint.store import SaveFailed
from hybridrl.core.cluster import WorkerDied
from hybridrl.core.experience.collector import Collected
from hybridrl.core.trainer import RLTask, Schedule, Trainer
from hybridrl.core.training.worker_group import BrokenUpdates
from hybridrl.health import HealthMonitor, Unhealthy
from hybridrl.health.rules import Diagnosis, Rule

pytestmark = pytest.mark.usefixtures("no_requests")


class Silent:
    """A stopwatch that measured nothing."""

    def take(self) -> dict[str, float]:
        return {}


@dataclass
class RecordingTask:
    """Four prompts per epoch, one per step; appends every call to `calls`."""

    calls: list = field(default_factory=list)
    prompts: int = 0
    last_prompt: int = 1000
    kill_at: int = 0

    @property
    def epochs(self) -> float:
        return self.prompts / 4

    @property
    def finished(self) -> bool:
        return self.prompts >= self.last_prompt

    def train_step(self, step: int) -> dict[str, float]:
        self.calls.append(("train", step))
        self.prompts += 1
        if step == self.kill_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return {"perf/total_num_tokens": 100, "loss": float(step)}

    def validate(self, step: int) -> dict[str, float]:
        self.calls.append(("validate", step))
        return {"val/loss": float(step)}

    def before_save(self) -> None:
        self.calls.append("before_save")

    def take_metrics(self) -> dict[str, float]:
        return {"timing_s/switch": 0.5}

    def problem(self) -> str:
        return "the task's problem"

    def record_diagnosis(self, step: int, *, show: bool) -> None:
        raise AssertionError("no test expects it")

    def rebuild(self) -> None:
        raise AssertionError("no test expects it")


class RecordingSaver:
    """Keeps each of `keeps`, and the last step, as the real one would."""

    def __init__(self, calls: list, keeps: tuple[int, ...] = (), *, ever: bool = True, failed: bool = False) -> None:
        self.calls, self.keeps = calls, keeps
        self.ever = ever
        self.watch, self.store = Silent(), SimpleNamespace(directory="run", last="last")
        self.failed = SaveFailed("the disk is full") if failed else None

    def due(self, step: int, epochs: tuple[float, float], *, last: bool) -> Save | None:
        self.calls.append(("due", step, epochs))
        return Save.KEPT if step in self.keeps or last else None

    def completed(self, step: int, metrics: dict[str, float], problem: str) -> None:
        self.latest = (step, metrics["loss"], problem)

    def start(self, save: Save | None) -> None:
        self.calls.append(("save", *self.latest, save or Save.RECOVERY))

    def rescue(self, error: Exception, prepare: Callable[[], None]) -> None:
        prepare()
        self.calls.append(("rescue", *self.latest, str(error)))

    def poll(self) -> None:
        self.calls.append("poll")

    def finish(self) -> None:
        self.calls.append("finish")


class RecordingWorkers:
    """Two devices; reports `reason` as what is wrong with the models."""

    group = (0, 1)

    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        self.limits: list[tuple[int, str, str]] = []
        self.broken = False

    def stop_if_broken(self, most: int, directory: str, last_checkpoint: str) -> None:
        self.limits.append((most, directory, last_checkpoint))
        if self.broken:
            raise BrokenUpdates("3 updates in a row")

    def problem(self) -> str:
        return self.reason


class RecordingTracker:
    def __init__(self) -> None:
        self.logged: dict[int, dict[str, float]] = {}

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.logged[step] = metrics


def trainer(
    task: RecordingTask,
    schedule: Schedule,
    saver: RecordingSaver | None = None,
    reason: str = "",
    health: HealthMonitor | None = None,
) -> Any:
    saver = saver or RecordingSaver(task.calls)
    return Trainer(task, RecordingWorkers(reason), RecordingTracker(), saver, schedule, health or HealthMonitor())


def steps(task: RecordingTask, kind: str) -> list[int]:
    return [call[1] for call in task.calls if call[0] == kind]


def test_a_run_trains_validates_logs_and_saves_in_this_order():
    task = RecordingTask()
    loop = trainer(task, Schedule(2, validate_every=2))
    loop.fit(0, {"timing_s/start_up": 9.0})
    assert task.calls == [
        ("train", 1),
        "poll",
        ("due", 1, (0.0, 0.25)),
        ("train", 2),
        ("validate", 2),
        "poll",
        ("due", 2, (0.25, 0.5)),
        "before_save",
        ("save", 2, 2.0, "the task's problem", Save.KEPT),
        "finish",
    ]
    assert list(loop.tracker.logged) == [1, 2]
    second = loop.tracker.logged[2]
    assert second["val/loss"] == 2.0 and second["timing_s/switch"] == 0.5 and second["training/global_step"] == 2
    assert second["perf/throughput"] == pytest.approx(100 / (second["timing_s/step"] * 2))


def test_a_first_validation_is_logged_as_step_0_and_only_by_a_new_run():
    for done, expected in ((0, [0, 1, 2, 3]), (1, [2, 3])):
        task = RecordingTask()
        trainer(task, Schedule(3, validate_every=1, validate_first=True)).fit(done, {})
        assert steps(task, "validate") == expected


def test_a_run_that_only_validates_trains_nothing():
    task = RecordingTask()
    trainer(task, Schedule(3, validate_every=1, validate_first=True, validate_only=True)).fit(0, {})
    assert task.calls == [("validate", 0)]


def test_a_resumed_run_starts_after_its_checkpoint_and_logs_its_start_up_once():
    task = RecordingTask()
    loop = trainer(task, Schedule(4, validate_every=-1))
    loop.fit(2, {"timing_s/start_up": 9.0})
    assert steps(task, "train") == [3, 4] and steps(task, "validate") == [4], "the last, whatever the frequency"
    assert [("timing_s/start_up" in metrics) for metrics in loop.tracker.logged.values()] == [True, False]


def test_a_run_whose_prompts_are_used_up_ends_before_its_steps_as_if_it_were_the_last():
    task = RecordingTask(last_prompt=2)
    trainer(task, Schedule(10, validate_every=-1)).fit(0, {})
    assert steps(task, "train") == [1, 2] and steps(task, "validate") == [2] and steps(task, "save") == [2]


def test_a_signal_ends_the_run_after_the_step_with_a_recovery_checkpoint():
    task = RecordingTask(kill_at=2)
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        trainer(task, Schedule(5, validate_every=-1)).fit(0, {})
    assert steps(task, "train") == [1, 2]
    assert ("save", 2, 2.0, "the task's problem", Save.RECOVERY) in task.calls and task.calls[-1] == "finish"


@pytest.mark.parametrize(("total", "keeps"), [(2, ()), (5, (2,))])
def test_a_signal_in_a_step_that_is_kept_anyway_saves_it_once(total, keeps):
    task = RecordingTask(kill_at=2)
    with pytest.raises(KeyboardInterrupt):
        trainer(task, Schedule(total, validate_every=-1), RecordingSaver(task.calls, keeps)).fit(0, {})
    assert [(call[1], call[-1]) for call in task.calls if call[0] == "save"] == [(2, Save.KEPT)]


def test_a_run_whose_last_save_failed_ends_with_that_error():
    task = RecordingTask()
    with pytest.raises(SaveFailed, match="disk is full"):
        trainer(task, Schedule(1, validate_every=-1), RecordingSaver(task.calls, failed=True)).fit(0, {})


def test_a_problem_of_the_models_is_saved_before_one_of_the_task():
    task = RecordingTask()
    loop = trainer(task, Schedule(1, validate_every=-1, max_skipped_updates=7), reason="an update was not finite")
    loop.fit(0, {})
    assert task.calls[-2][-2] == "an update was not finite"
    assert loop.workers.limits == [(7, "run", "last")]


@dataclass
class FailingTask(RecordingTask):
    """Fails in step 3 with this error."""

    error: Exception = field(default_factory=RuntimeError)

    def train_step(self, step: int) -> dict[str, float]:
        if step == 3:
            raise self.error
        return super().train_step(step)


def test_an_error_saves_the_step_before_it_and_ends_the_run():
    task = FailingTask(error=RuntimeError("the reward function failed"))
    with pytest.raises(RuntimeError, match="the reward function failed"):
        trainer(task, Schedule(5, validate_every=-1)).fit(0, {})
    assert task.calls[-2:] == ["before_save", ("rescue", 2, 2.0, "the task's problem", "the reward function failed")]


def test_a_lost_worker_leaves_nothing_to_save():
    task = FailingTask(error=WorkerDied("train worker 1 was killed"))
    with pytest.raises(WorkerDied):
        trainer(task, Schedule(5, validate_every=-1)).fit(0, {})
    assert not steps(task, "rescue")


def test_updates_that_are_broken_end_the_run_after_their_step_is_logged_and_saved():
    task = RecordingTask()
    loop = trainer(task, Schedule(5, validate_every=-1), reason="an update was not finite")
    loop.workers.broken = True
    with pytest.raises(BrokenUpdates):
        loop.fit(0, {})
    assert task.calls[-1] == ("rescue", 1, 1.0, "an update was not finite", "3 updates in a row")
    assert list(loop.tracker.logged) == [1]


def test_a_diagnosis_is_logged_and_weights_after_a_collapse_are_not_healthy():
    task, rule = RecordingTask(), Rule("collapse", lambda history: Diagnosis("collapsed", "lower lr"), damages=True)
    task.problem = lambda: ""
    task.record_diagnosis = lambda step, *, show: task.calls.append(("show", step, show))
    loop = trainer(task, Schedule(1, validate_every=-1), health=HealthMonitor(rules=[rule]))
    loop.fit(0, {})
    assert loop.tracker.logged[1]["health/collapse"] == 1.0
    assert ("save", 1, 1.0, "collapsed", Save.KEPT) in task.calls and ("show", 1, False) in task.calls


def test_a_diagnosis_shows_samples_and_ends_the_run_where_it_is_to_be_stopped():
    task = RecordingTask()
    task.record_diagnosis = lambda step, *, show: task.calls.append(("show", step, show))
    rule = Rule("flat", lambda history: Diagnosis("no signal", "other data") if history.step == 2 else None, shows=True)
    loop = trainer(task, Schedule(5, validate_every=-1), health=HealthMonitor(rules=[rule], actions={"flat": "stop"}))
    with pytest.raises(Unhealthy, match=r"trainer\.on_diagnosis\.flat=stop: no signal; other data"):
        loop.fit(0, {})
    assert list(loop.tracker.logged) == [1, 2] and ("show", 2, True) in task.calls
    assert task.calls[-1][:2] == ("rescue", 2)


def test_a_diagnosis_of_memory_sees_what_the_devices_measured_and_starts_new_servers():
    task = RecordingTask()
    task.record_diagnosis = lambda step, *, show: None
    task.take_metrics = lambda: {"perf/host_memory_free_gb": 100.0 - len(task.calls)}
    task.rebuild = lambda: task.calls.append("rebuild")
    health = HealthMonitor(warn=lambda text, code: None, actions={"memory-full": "rebuild"})
    loop = trainer(task, Schedule(22, validate_every=-1), health=health)
    loop.fit(0, {})
    assert loop.tracker.logged[20]["health/memory-full"] == 1.0
    calls = [call for call in task.calls if call[0] == "train" or call == "rebuild"]
    assert calls.index("rebuild") == calls.index(("train", 20)) + 1 and calls.count("rebuild") == 1


class RecordingStep:
    """Experience, algorithm and workers of a step in one; every call fills its field and is appended to `calls`."""

    bypass, signals = False, ()
    copies: Mapping[str, tuple[int, float]] = MappingProxyType({})

    def __init__(self, batch, **facts: Any) -> None:
        self.batch, self.calls = batch, []
        vars(self).update(facts)

    def collect(self, step: int) -> Collected:
        self.calls.append(("collect", step))
        return Collected(self.batch, ["an episode"], {"timing_s/gen": 1.0})

    def old_log_probs(self, batch, algorithm, step: int):
        assert algorithm is self
        self.calls.append("old_log_probs")
        return replace(batch, old_log_probs=batch.rollout_log_probs)

    def fill(self, batch, signal: str):
        self.calls.append(signal)
        return batch

    def advantages(self, batch):
        self.calls.append("advantages")
        zeros = torch.zeros(4)
        return replace(batch, token_rewards=zeros, advantages=zeros, returns=zeros), {"actor/reward_kl_penalty": 0.0}

    def update(self, batch, step: int):
        self.calls.append(("update", step))
        return batch, {"actor/grad_norm": 1.0}

    def refresh(self, name: str, share: float) -> None:
        self.calls.append(("refresh", name, share))


@pytest.fixture
def rows(make_batch):
    """Two responses of two tokens each, sampled with log-prob -1."""
    batch = make_batch([2, 2], rewards=[0.0, 1.0], truncated=[False, False])
    return replace(batch, rollout_log_probs=torch.full((4,), -1.0))


def run_step(parts: RecordingStep, step: int = 3, **options) -> tuple[dict[str, float], list]:
    logged: list = []
    sample_log = SimpleNamespace(
        training_samples=lambda step, samples, batch: logged.append((step, samples)),
        forget=lambda: logged.append("forgotten"),
    )
    task = RLTask(parts, parts, None, parts, None, sample_log, **options)
    return task.train_step(step), logged


def test_a_step_collects_computes_log_probs_advantages_and_updates(rows):
    parts = RecordingStep(rows)
    metrics, logged = run_step(parts)
    assert parts.calls == [("collect", 3), "old_log_probs", "advantages", ("update", 3)]
    assert logged == ["forgotten", (3, ["an episode"])]
    assert metrics["timing_s/gen"] == 1.0 and metrics["actor/grad_norm"] == 1.0 and metrics["critic/score/mean"] == 0.5
    assert metrics["training/rollout_probs_diff_max"] == 0.0


def test_the_signals_of_the_algorithm_are_filled_in_their_order_before_the_advantages(rows):
    parts = RecordingStep(rows, signals=("reference", "values"))
    run_step(parts)
    assert parts.calls[1:-1] == ["old_log_probs", "reference", "values", "advantages"]


def test_copies_of_the_policy_follow_it_at_their_frequency_by_their_share(rows):
    for step, refreshed in ((4, ["reference", "teacher.mean"]), (3, ["teacher.mean"])):
        parts = RecordingStep(rows, copies={"reference": (2, 1.0), "teacher.mean": (1, 0.05)})
        run_step(parts, step)
        assert [call[1:] for call in parts.calls if call[0] == "refresh"] == [
            (name, {"reference": 1.0, "teacher.mean": 0.05}[name]) for name in refreshed
        ]


def test_in_bypass_mode_nothing_is_reported_of_a_difference_that_cannot_be(rows):
    metrics, _ = run_step(RecordingStep(rows, bypass=True))
    assert not any(name.startswith("training/rollout") for name in metrics)


def test_samples_are_written_before_a_checkpoint_is():
    calls: list[str] = []
    devices = SimpleNamespace(to_training=lambda: calls.append("devices"))
    sample_log = SimpleNamespace(flush=lambda: calls.append("samples"))
    RLTask(None, None, devices, None, None, sample_log).before_save()
    assert calls == ["samples", "devices"]


def test_validation_logs_its_samples_and_is_empty_without_validation_data():
    logged: list = []
    sample_log = SimpleNamespace(validation_samples=lambda step, samples: logged.append((step, samples)))
    evaluator = SimpleNamespace(evaluate=lambda step: (["an episode"], {"val-core/acc": 1.0}))
    task = RLTask(None, None, None, None, evaluator, sample_log)
    assert task.validate(5) == {"val-core/acc": 1.0} and logged == [(5, ["an episode"])]
    assert RLTask(None, None, None, None, None, sample_log).validate(5) == {}

"""A run from start to end, for any kind of training: directory, checkpoints, session, workers, tracker, loop."""

import gc
import logging
import os
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil
from transformers import PreTrainedTokenizerBase

from hybridrl import plugins
from hybridrl.checkpoint.saver import SavePlan, Saver, SaveTimes, Stateful
from hybridrl.checkpoint.store import Store, holder, resumable
from hybridrl.config import ConfigError, PPOConfig, SFTConfig, TrainingConfig
from hybridrl.config.compose import as_yaml, save_config
from hybridrl.config.load import hyperparameters
from hybridrl.config.schema import SFTTrainerConfig
from hybridrl.core import device as devices
from hybridrl.core.cluster import RaySession
from hybridrl.core.cluster.failures import typed_errors
from hybridrl.core.cluster.session import RayMetricsSink
from hybridrl.core.trainer import Schedule, Task, Trainer
from hybridrl.core.training.worker_group import TrainWorkers
from hybridrl.data.processor import save_readers
from hybridrl.health import HealthMonitor
from hybridrl.health.advice import advise
from hybridrl.health.rules import RULES, custom_rules
from hybridrl.runs.attempts import Adjusted, with_restarts
from hybridrl.runs.directory import PLACEMENT, RunDirectory
from hybridrl.runs.placement import describe, place_session, write_placement
from hybridrl.runs.resume import ResumePlan, check_complete, restore
from hybridrl.runs.trials import custom_sinks
from hybridrl.runtime.environment import ForkServer, without_expandable_segments
from hybridrl.runtime.guard import oom_kills
from hybridrl.tracking import Resume, Tracker, draw_curves, summary
from hybridrl.tracking.console import MessageHandler, info, on_terminal, stage, warn
from hybridrl.tracking.faults import recording
from hybridrl.tracking.report import read_metrics

CHATTY_LOGGERS = ("httpx", "httpx2", "httpcore", "openai", "datasets", "fsspec", "urllib3", "filelock", "matplotlib")

C = TypeVar("C", PPOConfig, SFTConfig)


class Job(Protocol):
    """One kind of training, for `run`. Its constructor loads and checks all inputs that need no device."""

    tokenizer: PreTrainedTokenizerBase
    model_path: str
    rows: int  # prompts or conversations per epoch
    description: str  # contents of a step
    contents: dict[str, list[str]]  # parts saved of each model
    asynchronous_saves: bool
    user_keys: dict[str, Any]  # for custom code
    engine_pool: tuple[int, int] | None  # the machines, and devices on each, that only engines use
    kl_in_reward: bool
    runs_episodes: bool  # in processes of their own

    def plan(self, directory: Path) -> ResumePlan:
        """Return the checkpoint to resume from and the number of steps; raises ConfigError."""

    def start(self, session: RaySession, stack: ExitStack, plan: ResumePlan, directory: Path) -> TrainWorkers:
        """Start every process of the run; `stack` closes the ones that do not belong to the session. Collects garbage
        while it waits for them."""

    def build(self, workers: TrainWorkers, tracker: Tracker) -> tuple[Task, dict[str, Stateful]]:
        """The task to train, and the parts whose state a checkpoint holds, by name."""

    def schedule(self, steps: int) -> Schedule: ...


class Sessions:
    """Reuses a Ray session if the next run requests the same and the last one did not fail. `forks` starts the workers
    on CPU."""

    def __init__(self, forks: ForkServer | None = None) -> None:
        self.forks = forks
        self._session: RaySession | None = None
        self._request: tuple = ()

    @contextmanager
    def open(
        self,
        trainer: SFTTrainerConfig,
        ray_init: dict[str, Any],
        user_keys: dict[str, Any],
        rollout: tuple[int, int] | None = None,
    ) -> Iterator[RaySession]:
        """Yield Ray with the devices of a run, without actors of earlier runs; `rollout`: machines for rollout alone,
        and devices on each."""
        # Processes get the keys of custom code from Ray, which gets them at its start.
        request = (trainer.device, trainer.nnodes, trainer.n_gpus_per_node, ray_init, user_keys, rollout)
        with stage("starting Ray"):
            if self._session is None or self._request != request:
                self.close()
                self._session, self._request = start_session(trainer, ray_init, self.forks, rollout), request
            else:
                self._session.renew()
        try:
            yield self._session
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = None
        gc.unfreeze()  # at the end of the process, libraries report remaining objects as leaks


def train(config: C, job_class: Callable[[C], Job], sessions: Sessions) -> None:
    """Run training, as often as `with_restarts` allows."""
    directory = open_directory(config.trainer.default_local_dir, "trainer.default_local_dir")
    other = holder(directory)  # if there is one, this run will be rejected, and must not change the record and page
    recorder = nullcontext() if other else recording(directory, host_memory_now)
    began, metrics = time.time(), directory / "metrics.jsonl"

    def has_begun() -> bool:
        return not other and metrics.is_file() and metrics.stat().st_mtime > began

    try:
        with recorder:
            try:
                with_restarts(
                    lambda adjusted: run(config, job_class, directory, adjusted, sessions, again=has_begun()), config
                )
            except KeyboardInterrupt:
                if has_begun():
                    draw_curves(directory)
                    info(summary(directory))
                    if config.trainer.resume_mode != "disable" and resumable(directory):
                        info("\nthe same command resumes the run")
                raise
    finally:  # once its end is recorded, also after an error
        if has_begun():
            write_page(directory)
    talks = getattr(job_class, "head", "language") == "language"  # a reward model only scores
    if talks and any(saved.has_model for saved in RunDirectory(directory).checkpoints):
        info(f"to talk to the model: hybridrl chat {shlex.quote(str(directory))}")


def write_page(directory: Path) -> None:
    """Write the run's report.html. Whatever goes wrong there costs the page, not the run."""
    try:
        path = plugins.load("page")([directory], directory / "report.html")
        info(f"\nthe report: {path}")
    except Exception as error:
        warn(f"{directory}/report.html could not be written: {error!r}", "report-lost")


def host_memory_now() -> dict[str, int | None]:
    """Bytes used by the driver, bytes that processes may still allocate, and the kernel's count of kills."""
    return {"rss": psutil.Process().memory_info().rss, "left": devices.memory_left(), "oom_kills": oom_kills()}


@typed_errors("the run")  # any call of Ray may fail once Ray is lost
def run(
    config: C, job_class: Callable[[C], Job], directory: Path, adjusted: Adjusted, sessions: Sessions, *, again: bool
) -> None:
    """Run one attempt; afterwards only Ray is still running. Checkpoints record the `adjusted` settings. `again`: an
    attempt of this run has begun before."""
    began = time.monotonic()
    job = job_class(config)
    with ExitStack() as stack:
        store = stack.enter_context(closing(open_checkpoints(config.trainer, directory, again=again)))
        plan = job.plan(directory)
        saved, schedule = plan.checkpoint, job.schedule(plan.steps)
        info(f"{plan.steps} step{'s' * (plan.steps > 1)}: {job.description}")
        if not schedule.validate_only and (last := check_complete(config, plan, directory)):
            return info(f"the run is complete: {last.step} of {plan.steps} steps are done ({last.path})")
        text = as_yaml(config)
        save_config(text, directory / "config.yaml")
        request = config.trainer, config.ray_kwargs.ray_init, job.user_keys, job.engine_pool
        session = stack.enter_context(sessions.open(*request))
        (directory / PLACEMENT).unlink(missing_ok=True)
        if session.joined:
            placed = place_session(session, config, episodes=job.runs_episodes)
            write_placement(placed, directory)
            info(describe(placed))
        if len(session.first_devices) > 1:
            plugins.load("machines")(session, directory, asdict(config))
        workers = job.start(session, stack, plan, directory)
        resume = Resume(plan.done, saved.state["sinks"] if saved.path.parent == directory else {}) if saved else None
        (directory / "report.html").unlink(missing_ok=True)  # the page of an earlier run is outdated
        tracker = stack.enter_context(open_tracker(config, directory, plan.steps, resume, exported=session.joined))
        task, parts = job.build(workers, tracker)
        start_up = {"timing_s/start_up": time.monotonic() - began}
        if saved:
            restore(config.trainer, plan, workers, parts, job.rows, kl_in_reward=job.kl_in_reward)
        else:
            tracker.log(0, start_up)
        saves = SavePlan(
            contents=job.contents,
            times=save_times(config.trainer),
            complete=partial(save_readers, job.tokenizer, job.model_path),
            config=text,
            fixed=plan.identity.state() | {"adjusted": adjusted},
            asynchronous=job.asynchronous_saves,
            lack=plugins.load("room")(config, directory / "logs").lack,
        )
        saver = stack.enter_context(closing(Saver(workers, store, saves, parts, tracker)))
        earlier = read_metrics(directory) if resume else {}
        rules = [*RULES, *custom_rules(config.trainer.health_rules)]
        health = HealthMonitor(earlier, rules, actions=config.trainer.on_diagnosis)
        if on_terminal():
            info(f"to watch it: hybridrl report {shlex.quote(str(directory))} --live")
        gc.freeze()  # modules and data stay for the whole run: each collection would scan them for 0.3 s
        Trainer(task, workers, tracker, saver, schedule, health).fit(plan.done, start_up)
        if "wandb" in config.trainer.logger:  # it uploads the page as it closes
            write_page(directory)
    draw_curves(directory)
    info(summary(directory))
    for advice in advise(read_metrics(directory), config):
        info(f"\nadvice: {advice}")


def open_directory(path: str | Path, key: str) -> Path:
    """Make a directory with a place for the logs, and print logged messages. Raises ConfigError if it cannot be made or
    written; `key` is the setting that names it."""
    directory = Path(path).expanduser()
    try:
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()  # permissions alone do not say whether it can be written
    except OSError as error:
        cause = f"{key}={directory} cannot be {'written' if os.path.isdir(directory) else 'made'}: {error.strerror}"
        raise ConfigError(cause, fix="name another directory") from error
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[MessageHandler()], force=True)
    for name in CHATTY_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    return directory.absolute()


def open_checkpoints(trainer: SFTTrainerConfig, directory: Path, *, again: bool = False) -> Store:
    """Open the checkpoints of a run; it holds the directory's lock from here on."""
    leave = again or trainer.resume_mode != "disable"
    return Store(directory, keep=trainer.max_actor_ckpt_to_keep, keep_best=trainer.keep_best_ckpt, leave=leave)


def save_times(trainer: SFTTrainerConfig) -> SaveTimes:
    return SaveTimes(trainer.save_freq, trainer.save_freq_epochs, trainer.save_freq_secs, trainer.ckpt_freq_secs)


def open_tracker(
    config: TrainingConfig, directory: Path, steps: int, resume: Resume | None, *, exported: bool = False
) -> Tracker:
    """All sinks of a run; `exported`: also Ray's metrics, which a joined cluster may export to Prometheus."""
    trainer = config.trainer
    names = (trainer.project_name, trainer.experiment_name)
    sinks = {"ray": RayMetricsSink(*names)} if exported else {}
    values = asdict(config), steps, resume, hyperparameters(config), sinks
    return Tracker(trainer.logger, directory, *names, *values, custom_sinks(trainer.logger))


def start_session(
    trainer: SFTTrainerConfig,
    ray_init: dict,
    forks: ForkServer | None = None,
    rollout: tuple[int, int] | None = None,
) -> RaySession:
    """Start or join Ray, and reserve the devices. `rollout`: machines for rollout alone, if any, and devices on
    each."""
    assert trainer.n_gpus_per_node is not None
    if trainer.device == "cuda":
        for name in without_expandable_segments():
            cause = "workers run without expandable_segments, as engines could not open the trainer's memory"
            warn(f"{name}: {cause}", "allocator")
    devices, timeout = (trainer.nnodes, trainer.n_gpus_per_node), trainer.startup_timeout
    return RaySession(trainer.device, *devices, ray_init, timeout, forks, rollout)

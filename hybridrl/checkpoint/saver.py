"""Saving checkpoints while training continues. Workers write in the background, and a thread of the driver publishes
complete checkpoints: a step that fails in the meantime costs no checkpoint.

At most one save is in progress. A failed save costs only itself: training continues, and older checkpoints are intact.
"""

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from threading import Event
from typing import Any, Protocol

import numpy as np

from hybridrl.checkpoint.files import forget_missing_code
from hybridrl.checkpoint.store import Checkpoint, SaveFailed, Store
from hybridrl.config.compose import save_config
from hybridrl.config.files import HUGGINGFACE
from hybridrl.tracking import Stopwatch
from hybridrl.tracking.console import info, warn

ARRAYS = "state.npz"
WAIT_SECONDS = 0.02  # between checks of the files on disk
WHOLE = "hf_model"

# Without a frequency, a recovery checkpoint is due when the time since the last save is LEAST_TIMES its cost: the
# seconds that training waited, and WRITING_SHARE of the seconds of writing (writing slows steps down on CPU).
# It is due after LONGEST_INTERVAL seconds at the latest, also after a failed save.
LEAST_TIMES = 100
WRITING_SHARE = 0.25
LONGEST_INTERVAL = 600.0
QUIET_SECONDS = 600.0  # between messages about recovery checkpoints; the last one is always reported


def write_arrays(directory: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Write the arrays of a state to a separate file, if it has any. Returns the rest."""
    arrays = {key: value for key, value in state.items() if isinstance(value, np.ndarray)}
    if arrays:
        np.savez(directory / ARRAYS, **arrays)
    return {key: value for key, value in state.items() if key not in arrays}


def read_arrays(directory: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a checkpoint's state."""
    if not (directory / ARRAYS).exists():
        return {}
    with np.load(directory / ARRAYS, allow_pickle=False) as file:
        return dict(file)


class HasState(Protocol):
    """A part of a run with state in checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        """The state by keys that no other part uses: plain values, for state.json, and arrays."""


class Stateful(HasState, Protocol):
    """A part of a run with state that is also restored."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the part from a checkpoint's state, which has the keys of all parts."""


class SavableModels(Protocol):
    """The models of a run, as the training workers hold them."""

    updates_begun: int  # while it is unchanged, the weights belong to a complete step

    def start_save(self, directory: Path, contents: dict[str, list[str]]) -> None:
        """Start to write each model's parts; returns when they are copied to host memory."""

    def finished_save(self) -> bool:
        """Whether everything is written; raises RuntimeError once if writing failed."""

    def export(self, directory: Path, name: str) -> None:
        """Write a model as a Hugging Face directory."""


class Save(Enum):
    KEPT = "kept"
    RECOVERY = "recovery"  # only the newest one is kept, to resume from


@dataclass(frozen=True)
class SaveTimes:
    """The times of kept checkpoints and of recovery checkpoints. A checkpoint is kept every `steps` steps (0: at the
    end only; -1: never), `epochs` epochs, `seconds` seconds. The last step is kept if any step is. Recovery checkpoints
    are independent of these: every `recovery_seconds`, 0 or less for none, None for as often as the cost is small."""

    steps: int
    epochs: float | None
    seconds: float | None
    recovery_seconds: float | None

    @property
    def keeps_any(self) -> bool:
        return self.steps >= 0 or self.epochs is not None or self.seconds is not None

    @property
    def ever(self) -> bool:
        return self.keeps_any or self.recovery_seconds is None or self.recovery_seconds > 0

    def keeps(self, step: int, epochs: tuple[float, float], seconds: float) -> bool:
        """Whether to keep a step. `epochs`: epochs done before and after it; `seconds`: age of the last kept one."""
        by_steps = self.steps > 0 and step % self.steps == 0
        by_epochs = self.epochs is not None and epochs[0] // self.epochs < epochs[1] // self.epochs
        return by_steps or by_epochs or (self.seconds is not None and seconds >= self.seconds)

    def recovers(self, seconds: float, cost: float) -> bool:
        """Whether to save a recovery checkpoint, `seconds` after the last save, which cost training `cost` seconds."""
        if self.recovery_seconds is None:
            return seconds >= min(LEAST_TIMES * cost, LONGEST_INTERVAL)
        return 0 < self.recovery_seconds <= seconds


@dataclass(frozen=True)
class SavePlan:
    """The contents and times of saves. `contents`: the saved parts (model, optimizer, extra, hf_model) by model (actor,
    critic, reference). `complete` adds the driver's files (the tokenizer) to a model's huggingface folder. `fixed`:
    the constant part of state.json. `lack` returns why the memory does not suffice for a save; empty if it does."""

    contents: dict[str, list[str]]
    times: SaveTimes
    complete: Callable[[Path], object]
    config: str
    fixed: dict[str, Any]
    asynchronous: bool = True
    lack: Callable[[], str] = str


class Saver:
    """Starts saves and follows them to the end. `parts`: parts of the driver by name; `log`: the state of the logs."""

    def __init__(
        self, models: SavableModels, store: Store, plan: SavePlan, parts: Mapping[str, HasState], log: HasState
    ) -> None:
        self.models, self.store, self.plan, self.parts, self.log = models, store, plan, parts, log
        self.watch = Stopwatch()
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publish")
        self.latest: dict[str, Any] = {}  # the state after the last complete step
        self.updates = 0  # updates begun by then
        self.saved: int | None = None  # the step of the last save, unless it failed
        self.publishing: Future[Checkpoint | None] | None = None
        self.writing = False  # whether the workers were writing at the last poll
        self.abandoned, self.last = Event(), False
        self.failed: SaveFailed | None = None  # if the last save failed
        self.blocked = self.took = 0.0  # seconds of the last save: in which training waited, and in total
        self.saved_at = self.kept_at = time.monotonic()
        self.reported_at, self.unreported = -math.inf, ""

    @property
    def ever(self) -> bool:
        """Whether anything is saved."""
        return self.plan.times.ever

    def due(self, step: int, epochs: tuple[float, float], *, last: bool) -> Save | None:
        """Return the kind of save that a step needs, or None. `epochs`: epochs done before and after the step."""
        now, times, self.last = time.monotonic(), self.plan.times, last
        if times.keeps_any and (last or times.keeps(step, epochs, now - self.kept_at)):
            return Save.KEPT
        if self.writing or self.publishing is not None:
            return None
        cost = math.inf if self.failed else self.blocked + WRITING_SHARE * max(self.took - self.blocked, 0.0)
        return Save.RECOVERY if times.recovers(now - self.saved_at, cost) else None

    def completed(self, step: int, metrics: dict[str, float], problem: str) -> None:
        """Record the state after a step. `start` saves it, or `rescue` if the next step fails. `problem`: reason to
        resume from another checkpoint; empty if this one is healthy."""
        state = {"step": step, "metrics": metrics, "healthy": not problem, "reason": problem}
        for part in self.parts.values():
            state |= part.state_dict()
        self.latest, self.updates = self.plan.fixed | state, self.models.updates_begun

    def start(self, save: Save | None) -> None:
        """Save the last complete step; None writes a recovery checkpoint. Returns when all models are copied to host
        memory."""
        save = save or Save.RECOVERY
        self.finish()
        self.saved_at = time.monotonic()
        if save is Save.KEPT:
            self.kept_at = self.saved_at
        with self.watch("save_checkpoint"):
            self._start(save, self.latest["step"])
        self.blocked = time.monotonic() - self.saved_at

    def _start(self, save: Save, step: int) -> None:
        if (left := self.store.directory / f"global_step_{step}") in self.store.left:
            return info(f"step {step} is not saved: {left}, of an earlier attempt, stays as it is")
        if not self.last and (lack := self.plan.lack()):  # after the last step nothing else needs the memory
            self.took, cause = math.inf, f"step {step} is not saved, as its copies do not fit: {lack}"
            return info(cause) if save is Save.RECOVERY else self._log_failure(SaveFailed(cause))
        try:
            directory = self.store.begin(step)
        except SaveFailed as error:
            return self._log_failure(error)
        state = self.latest | {"recovery": save is Save.RECOVERY} | self.log.state_dict()
        try:
            state = write_arrays(directory, state)
            state["sharded"] = sharded = self._write(directory, save)
            self.store.complete(step, state)
        except (OSError, RuntimeError) as error:
            return self._log_failure(self.store.failed(step, error))
        self.saved, self.writing = step, bool(sharded)
        self.abandoned.clear()
        self.publishing = self.thread.submit(self._publish, step, state, sharded)
        if not self.plan.asynchronous:
            self.finish()

    def rescue(self, error: Exception, prepare: Callable[[], None]) -> None:
        """Save the last complete step before an error ends the run, unless it is saved or the weights have changed.
        `prepare` brings the devices into the state for saving."""
        step = self.latest.get("step")
        sound = step is not None and self.models.updates_begun == self.updates
        try:
            if self.plan.times.ever and sound and step != self.saved:
                self.latest["stopped"] = str(error)
                prepare()
                self.start(Save.RECOVERY)
            self.finish()
        except Exception as second:  # the first error is the one to report
            warn(f"step {step} could not be saved: {second}", SaveFailed.code)

    def _write(self, directory: Path, save: Save) -> list[str]:
        """Write the driver's files, and start the workers' writing. Returns the models that they write in shards."""
        save_config(self.plan.config, directory / "config.yaml")
        for name, parts in self.plan.contents.items():
            if WHOLE in parts and (save is Save.KEPT or parts == [WHOLE]):  # no run resumes from it
                self.models.export(directory / name / HUGGINGFACE, name)
        sharded = {name: [part for part in parts if part != WHOLE] for name, parts in self.plan.contents.items()}
        self.models.start_save(directory, sharded)
        for name in self.plan.contents:
            self.plan.complete(directory / name / HUGGINGFACE)
            forget_missing_code(directory / name / HUGGINGFACE)
        return [name for name, parts in sharded.items() if parts]

    def _publish(self, step: int, state: dict[str, Any], sharded: list[str]) -> Checkpoint | None:
        """Publish a step when it is completely on disk; runs in the thread."""
        while not self.store.is_written(step, sharded):
            if self.abandoned.wait(WAIT_SECONDS):
                return None
        saved, note = self.store.publish(step, state), ""
        now = time.monotonic()
        self.took = now - self.saved_at
        if saved.state["recovery"]:
            note = " (a recovery checkpoint)"
        elif WHOLE not in self.plan.contents["actor"]:
            merge = f"hybridrl merge --local_dir {saved.path}/actor --target_dir merged"
            note = f" (to merge it: {merge})"
        size = sum(path.stat().st_size for path in saved.path.rglob("*"))
        self.unreported = f"saved {saved.path}: {size / 1e6:,.1f} MB in {self.took:.1f} s{note}"
        if not saved.state["recovery"] or now - self.reported_at >= QUIET_SECONDS:
            info(self.unreported)
            self.unreported, self.reported_at = "", now
        return saved

    def poll(self) -> None:
        """Check whether the save in progress failed or is done. Call it between steps, when the workers respond."""
        failure: Exception | None = None
        if self.writing:
            try:
                self.writing = not self.models.finished_save()
            except RuntimeError as error:
                self.abandoned.set()
                self.writing, failure = False, error
        if self.publishing is not None and (self.abandoned.is_set() or self.publishing.done()):
            publishing, self.publishing, self.failed = self.publishing, None, None
            try:
                if publishing.result() is None and failure:
                    self._log_failure(self.store.failed(self.saved, failure))
            except SaveFailed as error:
                self._log_failure(error)

    def close(self) -> None:
        """End the thread. A checkpoint that the workers complete later is published when the run is started again."""
        self.abandoned.set()
        self.thread.shutdown()
        if self.unreported:
            info(self.unreported)

    def finish(self) -> None:
        """Wait for the save in progress, if there is one."""
        self.poll()
        while self.writing or self.publishing is not None:
            time.sleep(WAIT_SECONDS)
            self.poll()

    def _log_failure(self, error: SaveFailed) -> None:
        self.failed = error
        self.saved = None
        warn(str(error), error.code)

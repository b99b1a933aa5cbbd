"""Saving checkpoints while training continues: workers write in the background, the driver publishes complete ones.

At most one save is in progress. A failed save costs only itself: training continues, and older checkpoints are intact.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from hybridrl.checkpoint.store import Checkpoint, SaveFailed, Store
from hybridrl.config.files import HUGGINGFACE
from hybridrl.tracking import Stopwatch
from hybridrl.tracking.console import info, warn

POLL_SECONDS = 0.1
WHOLE = "hf_model"


class HasState(Protocol):
    """A part of a run whose state a checkpoint holds."""

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values for state.json, by keys that no other part uses."""


class Stateful(HasState, Protocol):
    """A part of a run whose state is also put back."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the part from a checkpoint's state.json, which holds the keys of all parts."""


class SavableModels(Protocol):
    """The models of a run, as the training workers hold them."""

    def start_save(self, directory: Path, contents: dict[str, list[str]]) -> None:
        """Start to write each model's parts; returns when they are copied to host memory."""

    def finished_save(self) -> bool:
        """Whether all is written; raises RuntimeError once if something could not be."""

    def export(self, directory: Path, name: str) -> None:
        """Write a model as a Hugging Face directory."""


class Save(Enum):
    KEPT = "kept"
    RECOVERY = "recovery"  # only the newest one is kept, to resume from


@dataclass(frozen=True)
class SaveTimes:
    """When a checkpoint is saved to be kept, and when only to recover from. A checkpoint is kept every `steps` steps
    (0: at the end only; -1: never), `epochs` epochs, `seconds` seconds. The last step is kept wherever anything is."""

    steps: int
    epochs: float | None
    seconds: float | None
    recovery_seconds: float

    @property
    def ever(self) -> bool:
        return self.steps >= 0 or self.epochs is not None or self.seconds is not None

    def keeps(self, step: int, epochs: tuple[float, float], seconds: float) -> bool:
        """Whether to keep a step; `epochs` were done before and after it, the last kept one is `seconds` old."""
        by_steps = self.steps > 0 and step % self.steps == 0
        by_epochs = self.epochs is not None and epochs[0] // self.epochs < epochs[1] // self.epochs
        return by_steps or by_epochs or (self.seconds is not None and seconds >= self.seconds)

    def recovers(self, seconds: float) -> bool:
        return self.ever and 0 < self.recovery_seconds <= seconds


@dataclass(frozen=True)
class SavePlan:
    """What is saved of each model (actor, critic, reference): model, optimizer, extra, hf_model; and when. `complete`
    adds what the driver has (the tokenizer) to a model's huggingface folder. `fixed` is the part of state.json that is
    the same in every checkpoint of the run."""

    contents: dict[str, list[str]]
    times: SaveTimes
    complete: Callable[[Path], object]
    config: str
    fixed: dict[str, Any]
    asynchronous: bool = True


class Saver:
    """Starts saves and sees them through; `parts` give the driver's state by name."""

    def __init__(self, models: SavableModels, store: Store, plan: SavePlan, parts: Mapping[str, HasState]) -> None:
        self.models, self.store, self.plan, self.parts = models, store, plan, parts
        self.watch = Stopwatch()
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publish")
        self.writing: tuple[int, dict[str, Any]] | None = None  # by the workers
        self.publishing: Future[Checkpoint] | None = None
        self.failed: SaveFailed | None = None  # if the last save failed
        self.saved_at = self.kept_at = time.monotonic()

    def due(self, step: int, epochs: tuple[float, float], *, last: bool) -> Save | None:
        """Whether a step is to be saved, and how long it stays; `epochs` were done before and after it."""
        now, times = time.monotonic(), self.plan.times
        if times.ever and (last or times.keeps(step, epochs, now - self.kept_at)):
            return Save.KEPT
        return Save.RECOVERY if times.recovers(now - self.saved_at) else None

    def start(self, step: int, save: Save, metrics: dict[str, float], problem: str) -> None:
        """Save a step; returns when all models are copied to host memory. `problem` says why a run should rather resume
        from another checkpoint; empty: this one is healthy."""
        self.finish()
        self.saved_at = time.monotonic()
        if save is Save.KEPT:
            self.kept_at = self.saved_at
        with self.watch("save_checkpoint"):
            try:
                directory = self.store.begin(step)
            except SaveFailed as error:
                return self._log_failure(error)
            state = {"step": step, "metrics": metrics, "recovery": save is Save.RECOVERY}
            state |= {"healthy": not problem, "reason": problem}
            for part in self.parts.values():
                state |= part.state_dict()
            self.writing = (step, self.plan.fixed | state)
            try:
                self._write(directory)
            except (OSError, RuntimeError) as error:
                self.writing = None
                return self._log_failure(self.store.failed(step, error))
            if not self.plan.asynchronous:
                self.finish()

    def _write(self, directory: Path) -> None:
        (directory / "config.yaml").write_text(self.plan.config, encoding="utf-8")
        for name, parts in self.plan.contents.items():
            if WHOLE in parts:
                self.models.export(directory / name / HUGGINGFACE, name)
        sharded = {name: [part for part in parts if part != WHOLE] for name, parts in self.plan.contents.items()}
        self.models.start_save(directory, sharded)
        for name in self.plan.contents:
            self.plan.complete(directory / name / HUGGINGFACE)

    def poll(self) -> None:
        """Publish the checkpoint in progress if the workers have written all of it; called between steps."""
        if self.writing is not None:
            step, state = self.writing
            try:
                if not self.models.finished_save():
                    return
            except RuntimeError as error:
                self.writing = None
                return self._log_failure(self.store.failed(step, error))
            self.writing, self.publishing = None, self.thread.submit(self.store.publish, step, state)
        if self.publishing is not None and self.publishing.done():
            publishing, self.publishing, self.failed = self.publishing, None, None
            try:
                saved = publishing.result()
            except SaveFailed as error:
                return self._log_failure(error)
            note = ""
            if saved.state["recovery"]:
                note = " (a recovery checkpoint)"
            elif WHOLE not in self.plan.contents["actor"]:
                merge = f"python -m hybridrl.model_merger merge --local_dir {saved.path}/actor --target_dir merged"
                note = f" (to merge it: {merge})"
            info(f"saved {saved.path}{note}")

    def finish(self) -> None:
        """Wait for the save in progress, if there is one."""
        while self.writing is not None or self.publishing is not None:
            self.poll()
            time.sleep(POLL_SECONDS)

    def _log_failure(self, error: SaveFailed) -> None:
        self.failed = error
        warn(f"{error}; training continues")

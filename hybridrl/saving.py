"""Saving while training goes on: the workers write in the background, the driver publishes what is complete.

At most one save is under way. One that fails costs nothing but itself: the run goes on, the older steps are intact.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hybridrl.checkpoint.store import Saved, SaveFailed, Store
from hybridrl.config.model_directory import HUGGINGFACE
from hybridrl.runtime.timer import Stopwatch
from hybridrl.tracking.log import info
from hybridrl.training.worker_group import TrainWorkers

POLL_SECONDS = 0.1
WHOLE = "hf_model"


class Save(Enum):
    KEPT = "kept"
    RECOVERY = "recovery"  # only the newest one is kept, to go on from


@dataclass(frozen=True)
class SaveTimes:
    """When a step is saved to be kept, and when merely to go on from: every so many steps (0: at the end only; -1:
    never), epochs, seconds. The last step is kept wherever anything is."""

    steps: int
    epochs: float | None
    seconds: float | None
    recovery_seconds: float

    @property
    def ever(self) -> bool:
        return self.steps >= 0 or self.epochs is not None or self.seconds is not None

    def keeps(self, step: int, epochs: tuple[float, float], seconds: float) -> bool:
        """`epochs` were done before the step and after it; `seconds` ago a step was last kept."""
        by_steps = self.steps > 0 and step % self.steps == 0
        by_epochs = self.epochs is not None and epochs[0] // self.epochs < epochs[1] // self.epochs
        return by_steps or by_epochs or (self.seconds is not None and seconds >= self.seconds)

    def recovers(self, seconds: float) -> bool:
        return self.ever and 0 < self.recovery_seconds <= seconds


@dataclass(frozen=True)
class SavePlan:
    """What is saved of each model (actor, critic, reference): model, optimizer, extra, hf_model; and when. `complete`
    adds what the driver has to a model's huggingface folder."""

    contents: dict[str, list[str]]
    times: SaveTimes
    complete: Callable[[Path], object]
    config: str
    asynchronous: bool = True


class Saver:
    """Starts saves of a step and sees them through."""

    def __init__(self, workers: TrainWorkers, store: Store, plan: SavePlan) -> None:
        self.workers, self.store, self.plan = workers, store, plan
        self.watch = Stopwatch()
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publish")
        self.writing: tuple[int, dict[str, Any]] | None = None  # by the workers
        self.publishing: Future[Saved] | None = None
        self.failed: SaveFailed | None = None  # the last save, if it did
        self.saved_at = self.kept_at = time.monotonic()

    def due(self, step: int, epochs: tuple[float, float], *, last: bool) -> Save | None:
        """Whether a step is to be saved; `epochs` were done before and after it."""
        now, times = time.monotonic(), self.plan.times
        if times.ever and (last or times.keeps(step, epochs, now - self.kept_at)):
            return Save.KEPT
        return Save.RECOVERY if times.recovers(now - self.saved_at) else None

    def start(self, step: int, state: dict[str, Any]) -> None:
        """Save a step with the driver's state; returns when all models are copied to host memory."""
        self.finish()
        self.saved_at = time.monotonic()
        if not state["recovery"]:
            self.kept_at = self.saved_at
        with self.watch("save_checkpoint"):
            try:
                directory = self.store.begin(step)
            except SaveFailed as error:
                return self._tell(error)
            self.writing = (step, state)
            try:
                self._write(directory)
            except (OSError, RuntimeError) as error:
                self.writing = None
                return self._tell(self.store.failed(step, error))
            if not self.plan.asynchronous:
                self.finish()

    def _write(self, directory: Path) -> None:
        (directory / "config.yaml").write_text(self.plan.config, encoding="utf-8")
        for name, parts in self.plan.contents.items():
            if WHOLE in parts:
                self.workers.export(directory / name / HUGGINGFACE, name)
        sharded = {name: [part for part in parts if part != WHOLE] for name, parts in self.plan.contents.items()}
        self.workers.start_save(directory, sharded)
        for name in self.plan.contents:
            self.plan.complete(directory / name / HUGGINGFACE)

    def poll(self) -> None:
        """See whether the workers have written all, and then publish it; between steps."""
        if self.writing is not None:
            step, state = self.writing
            try:
                if not self.workers.finished_save():
                    return
            except RuntimeError as error:
                self.writing = None
                return self._tell(self.store.failed(step, error))
            self.writing, self.publishing = None, self.thread.submit(self.store.publish, step, state)
        if self.publishing is not None and self.publishing.done():
            publishing, self.publishing = self.publishing, None
            try:
                self._told(publishing.result())
            except SaveFailed as error:
                self._tell(error)

    def finish(self) -> None:
        """Wait for the save under way, if there is one."""
        while self.writing is not None or self.publishing is not None:
            self.poll()
            time.sleep(POLL_SECONDS)

    def _told(self, saved: Saved) -> None:
        self.failed = None
        whole = WHOLE in self.plan.contents["actor"]
        merge = f"python -m hybridrl.model_merger merge --local_dir {saved.path}/actor --target_dir merged"
        what = "a recovery checkpoint" if saved.state["recovery"] else f"to merge it: {merge}"
        info(f"saved {saved.path}" + ("" if whole and not saved.state["recovery"] else f" ({what})"))

    def _tell(self, error: SaveFailed) -> None:
        self.failed = error
        info(f"warning: {error}; the run goes on")

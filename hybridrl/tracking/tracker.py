"""Hands the metrics of a run to every sink that `trainer.logger` names; knows neither trainer nor workers."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from hybridrl.tracking import log as messages
from hybridrl.tracking.console import PlainSink, TerminalSink
from hybridrl.tracking.jsonl import JsonlSink
from hybridrl.tracking.sink import SampleRow, Sink


@dataclass(frozen=True)
class Resume:
    """A run goes on after `step`; `sinks` is what `Tracker.state` gave when that step was saved.

    Without `sinks` (a run that branches off into a directory of its own) nothing outside the directory is continued.
    """

    step: int
    sinks: dict[str, dict[str, Any]] = field(default_factory=dict)


class Tracker:
    """All sinks of a run as one; `metrics.jsonl` in `run_dir` (verl's `file`) is always among them.

    A resumed run's sinks go on where they were: what was logged for later steps is dropped.
    """

    def __init__(
        self,
        loggers: list[str],
        run_dir: Path,
        project_name: str,
        experiment_name: str,
        config: dict[str, Any],
        total_steps: int,
        resume: Resume | None = None,
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        last_step, states = (resume.step, resume.sinks) if resume else (None, {})
        self._run_dir = run_dir
        self._sinks: dict[str, Sink] = {}
        self._failed: set[str] = set()  # that have been warned of
        self._closing = ExitStack()
        self._add("file", JsonlSink(run_dir / "metrics.jsonl", last_step))
        # The modules of the next two are imported only when chosen: they are heavy, and wandb is an extra.
        if "tensorboard" in loggers:
            from hybridrl.tracking.tensorboard_sink import TensorBoardSink

            self._add("tensorboard", TensorBoardSink(run_dir / "tensorboard", last_step))
        if "wandb" in loggers:
            try:
                from hybridrl.tracking.wandb_sink import WandbSink
            except ImportError as error:
                messages.warn(f"trainer.logger=wandb left out: {error} (`pip install hybridrl[wandb]`)")
            else:
                run_id = states.get("wandb", {}).get("id")
                self._add("wandb", WandbSink(run_dir, project_name, experiment_name, config, run_id))
        if "console" in loggers:
            # Last to open, so that what the others say at their start stands above the bar.
            console = messages.console
            terminal = console.file.isatty() and not console.is_dumb_terminal
            self._add("console", TerminalSink(console, total_steps, last_step or 0) if terminal else PlainSink(console))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, sink in self._sinks.items():
            with self._surviving(name):
                sink.log(step, metrics)

    def samples(self, step: int, rows: list[SampleRow]) -> None:
        """Show validation answers on the console and in the sinks that have tables."""
        for name, sink in self._sinks.items():
            with self._surviving(name):
                sink.samples(step, rows)

    def state(self) -> dict[str, dict[str, Any]]:
        """What is saved with a step, for `Resume`; what was logged to files has reached the disk when this returns."""
        states = {}
        for name, sink in self._sinks.items():
            with self._surviving(name):
                states[name] = sink.state()
        return {name: state for name, state in states.items() if state}

    def print(self, text: str) -> None:
        """Print above the progress bar."""
        messages.info(text)

    def close(self) -> None:
        """Close every sink, also when one of them fails; a second call does nothing."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _add(self, name: str, sink: Sink) -> None:
        self._sinks[name] = sink
        self._closing.callback(self._close, name)

    def _close(self, name: str) -> None:
        with self._surviving(name):
            self._sinks[name].close()

    @contextmanager
    def _surviving(self, name: str) -> Iterator[None]:
        """Let a full disk cost no more than metrics, with one warning: a run is resumed without them."""
        try:
            yield
        except OSError as error:
            if name not in self._failed:
                self._failed.add(name)
                where = f"{self._run_dir}, logger {name}"
                messages.warn(
                    f"{where}: {error.strerror or error}; training continues, and metrics may be missing there"
                )

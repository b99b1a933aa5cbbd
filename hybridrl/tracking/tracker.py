"""Logs the metrics of a run to every sink in `trainer.logger`; knows neither trainer nor workers."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar

from hybridrl.tracking import console
from hybridrl.tracking.console import LineSink, TerminalSink, VerlSink, warn
from hybridrl.tracking.report import CurvesSink, JsonlSink
from hybridrl.tracking.sink import SampleRow, Sink
from hybridrl.tracking.trackers import SINKS

T = TypeVar("T")


@dataclass(frozen=True)
class Resume:
    """The run resumes after `step`; `sinks` is the `Tracker.state_dict()` of that checkpoint. Without it (a run that
    branches off into a new directory) nothing outside the directory is continued."""

    step: int
    sinks: dict[str, dict[str, Any]] = field(default_factory=dict)


class Tracker:
    """All sinks of a run, with those in `more`; `metrics.jsonl` in `run_dir` (verl's `file`) is always among them. The
    sinks of a resumed run continue after its step: anything logged for later steps is dropped."""

    def __init__(
        self,
        loggers: list[str],
        run_dir: Path,
        project_name: str,
        experiment_name: str,
        config: dict[str, Any],
        total_steps: int,
        resume: Resume | None = None,
        hyperparameters: dict[str, Any] | None = None,
        more: Mapping[str, Sink] = MappingProxyType({}),
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        last_step, states = (resume.step, resume.sinks) if resume else (None, {})
        self._run_dir = run_dir
        self._sinks: dict[str, Sink] = {}
        self._failed: set[str] = set()  # sinks with a warning already printed
        self._closing = ExitStack()
        self._add("file", JsonlSink(run_dir / "metrics.jsonl", last_step))
        self._add("curves", CurvesSink(run_dir))
        # The modules of the next two are imported only if configured: they are heavy.
        if "tensorboard" in loggers:
            from hybridrl.tracking.tensorboard_sink import TensorBoardSink

            self._add("tensorboard", TensorBoardSink(run_dir / "tensorboard", last_step, hyperparameters))
        if "wandb" in loggers:
            from hybridrl.tracking.wandb_sink import WandbSink

            run_id = states.get("wandb", {}).get("id")
            self._add("wandb", WandbSink(run_dir, project_name, experiment_name, config, run_id))
        for name in (name for name in SINKS if name in loggers):
            self._add(name, SINKS[name](run_dir, project_name, experiment_name, config, states.get(name, {})))
        for name, sink in more.items():
            self._add(name, sink)
        output = console.console
        if "verl_console" in loggers:
            self._add("verl_console", VerlSink(output))
        if "console" in loggers:
            # Opened last, so that messages of the other sinks appear above the bar.
            if console.on_terminal():
                self._add("console", TerminalSink(output, total_steps, last_step or 0))
            else:
                self._add("console", LineSink(output, total_steps, last_step or 0))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, sink in self._sinks.items():
            self._try(name, sink.log, step, metrics)

    def samples(self, step: int, rows: list[SampleRow]) -> None:
        """Show validation samples on the console and in the sinks that have tables."""
        for name, sink in self._sinks.items():
            self._try(name, sink.samples, step, rows)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the state of the sinks, for `Resume`; logged files have reached the disk when this returns."""
        states = {name: self._try(name, sink.state_dict) for name, sink in self._sinks.items()}
        return {"sinks": {name: state for name, state in states.items() if state}}

    def close(self) -> None:
        """Close every sink, even if one of them fails; a second call does nothing."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _add(self, name: str, sink: Sink) -> None:
        self._sinks[name] = sink
        self._closing.callback(self._try, name, sink.close)

    def _try(self, name: str, method: Callable[..., T], *arguments: Any) -> T | None:
        """Call a method of a sink; a full disk, or whatever fails in the package of a tracker, costs only metrics, with
        one warning per sink."""
        try:
            return method(*arguments)
        except Exception as error:
            if not isinstance(error, OSError) and name not in SINKS:
                raise
            if name not in self._failed:
                self._failed.add(name)
                cause = f"{self._run_dir}, logger {name}: {getattr(error, 'strerror', None) or error}"
                warn(f"{cause}; training continues, and metrics may be missing there", "metrics-lost")
            return None

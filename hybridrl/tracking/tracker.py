"""Hands the metrics of a run to every sink that `trainer.logger` names; knows neither trainer nor workers."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from hybridrl.tracking import log as messages
from hybridrl.tracking.console import PlainSink, TerminalSink
from hybridrl.tracking.jsonl import JsonlSink
from hybridrl.tracking.sink import SampleRow, Sink

KNOWN_LOGGERS = ("console", "file", "tensorboard", "wandb")


class Tracker:
    """All sinks of a run as one; `metrics.jsonl` in `run_dir` (verl's `file`) is always among them.

    A resumed run passes the `start_step` it goes on from: what was logged for later steps is dropped.
    """

    def __init__(
        self,
        loggers: list[str],
        run_dir: Path,
        project_name: str,
        experiment_name: str,
        config: dict[str, Any],
        total_steps: int,
        start_step: int = 0,
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._sinks: list[Sink] = []
        self._closing = ExitStack()
        _warn_of_unknown(loggers)
        self._add(JsonlSink(run_dir / "metrics.jsonl", start_step))
        # The modules of the next two are imported only when chosen: they are heavy, and wandb is an extra.
        if "tensorboard" in loggers:
            from hybridrl.tracking.tensorboard_sink import TensorBoardSink

            self._add(TensorBoardSink(run_dir / "tensorboard", start_step))
        if "wandb" in loggers:
            try:
                from hybridrl.tracking.wandb_sink import WandbSink
            except ImportError as error:
                messages.warn(f"trainer.logger=wandb left out: {error} (`pip install hybridrl[wandb]`)")
            else:
                self._add(WandbSink(run_dir, project_name, experiment_name, config))
        if "console" in loggers:
            # Last to open, so that what the others say at their start stands above the bar.
            console = messages.console
            terminal = console.file.isatty() and not console.is_dumb_terminal
            self._add(TerminalSink(console, total_steps, start_step) if terminal else PlainSink(console))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for sink in self._sinks:
            sink.log(step, metrics)

    def samples(self, step: int, rows: list[SampleRow]) -> None:
        """Show validation answers on the console and in the sinks that have tables."""
        for sink in self._sinks:
            sink.samples(step, rows)

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

    def _add(self, sink: Sink) -> None:
        self._sinks.append(sink)
        self._closing.callback(sink.close)


def _warn_of_unknown(loggers: list[str]) -> None:
    unknown = [name for name in loggers if name not in KNOWN_LOGGERS]
    if unknown:
        messages.warn(f"trainer.logger: {', '.join(unknown)} left out (there are {', '.join(KNOWN_LOGGERS)})")

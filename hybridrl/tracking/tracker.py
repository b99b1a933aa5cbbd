"""Logs the metrics of a run to every sink in `trainer.logger`; independent of trainer and workers.

The package of a tracker is imported only if the tracker is chosen. A resumed run logs from its checkpoint on. Later
steps that a tracker already has stay there: no tracker can delete.
"""

import importlib
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar

from hybridrl.tracking import console
from hybridrl.tracking.console import LineSink, TerminalSink, VerlSink, warn
from hybridrl.tracking.report import CurvesSink, JsonlSink
from hybridrl.tracking.secrets import mask_text, mask_values, masked_arguments
from hybridrl.tracking.sink import SampleRow, Sink

T = TypeVar("T")

# A failed call of SLOW_SECONDS or more is repeated after RETRY_TIMES its duration: a dead server stalls no run.
SLOW_SECONDS, RETRY_TIMES = 1.0, 10


@dataclass(frozen=True)
class Resume:
    """The run resumes after `step`; `sinks`: the `Tracker.state_dict()` of that checkpoint. Without it (a run that
    branches off into a new directory) no record outside the directory is continued."""

    step: int
    sinks: dict[str, dict[str, Any]] = field(default_factory=dict)


class Tracker:
    """All sinks of a run, with `additional` ones, and the user's custom ones (`custom` has the form of `SINKS`).
    `metrics.jsonl` in `run_dir` (verl's `file`) is always one of them. The sinks of a resumed run continue after its
    step: metrics of later steps are dropped."""

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
        additional: Mapping[str, Sink] = MappingProxyType({}),
        custom: Mapping[str, Callable[..., Sink]] = MappingProxyType({}),
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        last_step, states = (resume.step, resume.sinks) if resume else (None, {})
        config, hyperparameters = mask_values(config), mask_values(hyperparameters)
        self._run_dir = run_dir
        self._sinks: dict[str, Sink] = {}
        self._failed: set[str] = set()  # sinks with a warning already printed
        self._others: set[str] = set()  # sinks of other systems, in which anything may fail
        self._retry_at: dict[str, float] = {}
        self._closing = ExitStack()
        self._add("file", JsonlSink(run_dir / "metrics.jsonl", last_step))
        self._add("curves", CurvesSink(run_dir))
        if "tensorboard" in loggers:
            self._open("tensorboard", lambda _: _tensorboard(run_dir / "tensorboard", last_step, hyperparameters))
        names = (run_dir, project_name, experiment_name, config)
        for name, make in ({"wandb": _wandb} | SINKS | dict(custom)).items():
            if name in loggers:
                self._open(name, partial(make, *names, states.get(name, {})))
        for name, sink in additional.items():
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

    def _open(self, name: str, make: Callable[[bool], Sink]) -> None:
        """Open a sink of another system; `make(True)` returns one that records offline. A failure does not end the run:
        it is recorded offline, or not in this system."""
        self._others.add(name)
        cause = ""
        for offline in (False, True):
            try:
                with masked_arguments():
                    sink = make(offline)
            except Exception as error:
                cause = cause or mask_text(str(error).strip() or repr(error)).splitlines()[0]
                continue
            if cause:
                where = sink.offline.format(run_dir=self._run_dir)
                warn(f"trainer.logger={name}: {cause}; the run is recorded {where or 'there'}", "logger-offline")
            return self._add(name, sink)
        fix = f"correct its settings, or remove {name} from trainer.logger"
        warn(f"trainer.logger={name}: {cause}; training continues without it ({fix})", "metrics-lost")

    def _add(self, name: str, sink: Sink) -> None:
        self._sinks[name] = sink
        self._closing.callback(self._try, name, sink.close)

    def _try(self, name: str, method: Callable[..., T], *arguments: Any) -> T | None:
        """Call a method of a sink. A full disk, or an error in a tracker's package, costs only metrics and little time;
        there is one warning per sink."""
        began = time.monotonic()
        if began < self._retry_at.get(name, began):
            return None
        try:
            return method(*arguments)
        except Exception as error:
            if not isinstance(error, OSError) and name not in self._others:
                raise
            now = time.monotonic()
            if now - began >= SLOW_SECONDS:
                self._retry_at[name] = now + RETRY_TIMES * (now - began)
            if name not in self._failed:
                self._failed.add(name)
                cause = f"{self._run_dir}, logger {name}: {getattr(error, 'strerror', None) or error}"
                warn(f"{cause}; training continues, and metrics may be missing there", "metrics-lost")
            return None


# These heavy modules are imported only if configured.
def _tensorboard(*arguments: Any) -> Sink:
    from hybridrl.tracking.tensorboard_sink import TensorBoardSink

    return TensorBoardSink(*arguments)


def _wandb(*arguments: Any) -> Sink:
    from hybridrl.tracking.wandb_sink import WandbSink

    return WandbSink(*arguments)


# Limits of requests to a server; with MLflow's defaults each step waits for minutes if the server is gone.
MLFLOW_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
COLUMNS = ("prompt", "response", "ground_truth", "score")


def warn_offline(logger: str, cause: str, where: str) -> None:
    warn(f"trainer.logger={logger}: {cause}; the run is recorded {where}", "logger-offline")


class MlflowSink(Sink):
    """An MLflow run at MLFLOW_TRACKING_URI, without one in the run's directory; resumed by its id."""

    offline = "offline in {run_dir}/mlflow.db"

    def __init__(
        self, run_dir: Path, project: str, name: str, config: dict[str, Any], saved: dict[str, Any], offline: bool
    ) -> None:
        for setting, value in MLFLOW_PATIENCE.items():
            os.environ.setdefault(setting, value)
        self._mlflow = importlib.import_module("mlflow")
        saved = {} if offline else saved
        if offline or not os.environ.get("MLFLOW_TRACKING_URI"):
            self._mlflow.set_tracking_uri(f"sqlite:///{run_dir.absolute()}/mlflow.db")
            # Without a server, MLflow would write files to ./mlruns of the working directory.
            if self._mlflow.get_experiment_by_name(project) is None:
                self._mlflow.create_experiment(project, artifact_location=f"{run_dir.absolute()}/mlartifacts")
        self._mlflow.set_experiment(project)
        self._run = self._mlflow.start_run(run_id=saved.get("id"), run_name=None if saved else name)
        if not saved:
            self._mlflow.log_dict(config, "config.yaml")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        # MLflow does not accept @ in a name; verl replaces it in the same way.
        values = {key.replace("@", "_at_"): float(value) for key, value in metrics.items()}
        self._mlflow.log_metrics(values, step=step)

    def samples(self, step: int, rows: list[SampleRow]) -> None:
        self._mlflow.log_dict([vars(row) for row in rows], f"validation_samples/{step}.json")

    def state_dict(self) -> dict[str, Any]:
        return {"id": self._run.info.run_id}

    def close(self) -> None:
        self._mlflow.end_run()


class SwanlabSink(Sink):
    """A SwanLab run; without a key it is recorded offline in the run's directory."""

    offline = "offline in {run_dir}/swanlog"

    def __init__(
        self, run_dir: Path, project: str, name: str, config: dict[str, Any], saved: dict[str, Any], offline: bool
    ) -> None:
        self._swanlab = importlib.import_module("swanlab")
        mode, directory = "offline" if offline else os.environ.get("SWANLAB_MODE"), run_dir / "swanlog"
        saved = {} if offline else saved
        if (
            mode is None
            and not os.environ.get("SWANLAB_API_KEY")
            and not os.path.exists(os.path.expanduser("~/.swanlab/.netrc"))
        ):
            mode = "offline"
            warn_offline("swanlab", "no SWANLAB_API_KEY and no login", self.offline.format(run_dir=run_dir))
        directory.mkdir(exist_ok=True)
        options = {"id": saved["id"], "resume": "allow"} if saved else {}
        self._run = self._swanlab.init(
            project=project, name=name, config=config, log_dir=str(directory), mode=mode, **options
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._swanlab.log(metrics, step=step)

    def samples(self, step: int, rows: list[SampleRow]) -> None:
        texts = [f"{row.prompt}\n\n{row.response}\n\nground truth: {row.ground_truth}" for row in rows]
        shown = [
            self._swanlab.Text(text, caption=f"score {row.score:g}") for text, row in zip(texts, rows, strict=True)
        ]
        self._swanlab.log({"validation samples": shown}, step=step)

    def state_dict(self) -> dict[str, Any]:
        return {"id": self._run.id}

    def close(self) -> None:
        self._swanlab.finish()


class TrackioSink(Sink):
    """A Trackio run in Trackio's own directory (see `trackio show`); resumed by its name."""

    def __init__(
        self, run_dir: Path, project: str, name: str, config: dict[str, Any], saved: dict[str, Any], offline: bool
    ) -> None:
        self._trackio = importlib.import_module("trackio")
        self._run = self._trackio.init(project, saved.get("name", name), config=config, resume="allow", embed=False)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._trackio.log(metrics, step=step)

    def state_dict(self) -> dict[str, Any]:
        return {"name": self._run.name}

    def close(self) -> None:
        self._trackio.finish()


class ClearmlSink(Sink):
    """A ClearML task; without credentials it is recorded offline."""

    offline = "offline in ClearML's cache"

    def __init__(
        self, run_dir: Path, project: str, name: str, config: dict[str, Any], saved: dict[str, Any], offline: bool
    ) -> None:
        task = importlib.import_module("clearml").Task
        configured = os.environ.get("CLEARML_CONFIG_FILE", os.path.expanduser("~/clearml.conf"))
        has_key = os.environ.get("CLEARML_API_ACCESS_KEY") or Path(configured).exists()
        saved = {} if offline else saved
        if offline or not has_key:
            task.set_offline(True)
        if not offline and not has_key:
            warn_offline("clearml", "no CLEARML_API_ACCESS_KEY and no clearml.conf", self.offline)
        # ClearML's capture of arguments, frameworks and the console would change the run and its output.
        captures = dict.fromkeys(("auto_connect_arg_parser", "auto_connect_frameworks", "auto_connect_streams"), False)
        self._task = task.init(
            project, name, reuse_last_task_id=False, continue_last_task=saved.get("id", False), **captures
        )
        self._task.connect(config, name="config")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        logger = self._task.get_logger()
        for key, value in metrics.items():
            title, _, series = key.rpartition("/")
            logger.report_scalar(title or key, series, float(value), iteration=step)

    def samples(self, step: int, rows: list[SampleRow]) -> None:
        cells = [list(COLUMNS), *([getattr(row, name) for name in COLUMNS] for row in rows)]
        self._task.get_logger().report_table("validation", "samples", iteration=step, table_plot=cells)

    def state_dict(self) -> dict[str, Any]:
        return {"id": self._task.id}

    def close(self) -> None:
        self._task.close()


SINKS = {"mlflow": MlflowSink, "swanlab": SwanlabSink, "trackio": TrackioSink, "clearml": ClearmlSink}

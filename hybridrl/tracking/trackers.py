"""Other trackers, each through its own package, which is imported only if it is in `trainer.logger`.

What a tracker already has of steps after the checkpoint that a run resumes from stays there: none of them can delete.
"""

import importlib
import os
from pathlib import Path
from typing import Any

from hybridrl.tracking.console import warn
from hybridrl.tracking.sink import SampleRow, Sink

# Of requests to a server; MLflow's own defaults wait for minutes in each step if it is gone.
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
            # MLflow would write the files of a run that has no server to ./mlruns, wherever the run was started.
            if self._mlflow.get_experiment_by_name(project) is None:
                self._mlflow.create_experiment(project, artifact_location=f"{run_dir.absolute()}/mlartifacts")
        self._mlflow.set_experiment(project)
        self._run = self._mlflow.start_run(run_id=saved.get("id"), run_name=None if saved else name)
        if not saved:
            self._mlflow.log_dict(config, "config.yaml")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        # MLflow accepts no @ in a name; verl writes the same in its place.
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
    """A Trackio run, in Trackio's own directory, which `trackio show` reads; resumed by its name."""

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
        # Its capture of arguments, frameworks and the console would change what the run does and shows.
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

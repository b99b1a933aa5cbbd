"""The sinks of a run through `Tracker`: the file, the console and the configured loggers."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybridrl.tracking import Resume, SampleRow, Tracker
from hybridrl.tracking.sink import Sink
from hybridrl.tracking.tracker import MLFLOW_PATIENCE, SINKS

SAMPLE = SampleRow(prompt="2 + 3 = ?", response="[b]5[/b]\x1b[31m", ground_truth="5", score=1.0)


class Service(Sink):
    """Stands in for a service: takes everything."""

    def __init__(self, *_: object) -> None: ...

    def log(self, step: int, metrics: dict[str, float]) -> None: ...


def tracker(run_dir: Path, loggers: list[str]) -> Tracker:
    return Tracker(loggers, run_dir, "project", "experiment", {"seed": 1}, total_steps=3)


def lines(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_every_log_call_is_one_line_on_disk_before_the_tracker_closes(tmp_path):
    with tracker(tmp_path, ["file"]) as run:
        run.log(1, {"critic/rewards/mean": 0.1 + 0.2, "perf/total_num_tokens": 10240})
        assert lines(tmp_path) == [
            {"step": 1, "critic/rewards/mean": 0.30000000000000004, "perf/total_num_tokens": 10240}
        ]


def test_values_that_json_lacks_are_null(tmp_path):
    with tracker(tmp_path, []) as run:
        run.log(1, {"nan": math.nan, "inf": math.inf, "minus_inf": -math.inf, "fine": 1e-9})
    assert lines(tmp_path) == [{"step": 1, "nan": None, "inf": None, "minus_inf": None, "fine": 1e-9}]


def test_a_new_run_in_an_old_directory_starts_empty_and_the_old_metrics_are_moved_aside(tmp_path):
    with tracker(tmp_path, []) as run:
        run.log(1, {"a": 1})
    for value in (2, 3):
        with tracker(tmp_path, []) as run:
            run.log(1, {"a": value})
    assert lines(tmp_path) == [{"step": 1, "a": 3}]
    for number in (1, 2):
        assert json.loads((tmp_path / f"metrics.previous-{number}.jsonl").read_text()) == {"step": 1, "a": number}


def test_a_full_disk_stops_no_run_and_missing_lines_are_written_once_there_is_room(tmp_path, capsys, full_disk):
    with tracker(tmp_path, ["tensorboard"]) as run:
        run.log(1, {"a": 1.0})
        full_disk((tmp_path / "metrics.jsonl").stat().st_size + 5)
        for step in (2, 3):
            run.log(step, {"a": 1.0})
            assert run.state_dict() == {"sinks": {}}
        full_disk(None)
        run.log(4, {"a": 1.0})
    assert lines(tmp_path) == [{"step": step, "a": 1.0} for step in (1, 2, 3, 4)]
    first, second = capsys.readouterr().out.splitlines()
    cause = f"{tmp_path}, logger file: File too large"
    assert first == f"warning: {cause}; training continues, and metrics may be missing there [metrics-lost]"
    assert "logger tensorboard" in second


def test_without_a_terminal_a_step_is_one_line_of_its_main_metrics(tmp_path, capsys):
    with tracker(tmp_path, ["console"]) as run:
        run.log(7, {"critic/rewards/mean": 0.123456789, "actor/entropy": 0.25} | {f"k{i}": 0.5 for i in range(40)})
    assert capsys.readouterr().out == "step 7    reward 0.123 entropy 0.250\n"


def test_verls_line_of_all_metrics_is_a_logger_of_its_own(tmp_path, capsys):
    with tracker(tmp_path, ["verl_console"]) as run:
        run.log(
            7, {"critic/rewards/mean": 0.123456789, "actor/lr": 1e-6, "n": 10240} | {f"k{i}": 0.5 for i in range(40)}
        )
    expected = "step:7 - critic/rewards/mean:0.123457 - actor/lr:1e-06 - n:10240"
    assert capsys.readouterr().out == expected + "".join(f" - k{i}:0.5" for i in range(40)) + "\n"


def test_without_the_console_logger_a_step_prints_nothing(tmp_path, capsys):
    with tracker(tmp_path, ["file"]) as run:
        run.log(1, {"a": 1.0})
    assert capsys.readouterr().out == ""


def test_samples_are_shown_literally_and_without_escape_codes(tmp_path, capsys):
    with tracker(tmp_path, ["console"]) as run:
        run.samples(1, [SAMPLE])
    shown = capsys.readouterr().out
    assert "2 + 3 = ?" in shown and "[b]5[/b]" in shown
    assert "\x1b" not in shown


def test_tensorboard_files_hold_the_scalars_and_the_samples(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with tracker(tmp_path, ["tensorboard"]) as run:
        run.log(1, {"critic/rewards/mean": 0.25})
        run.samples(1, [SAMPLE])
        run.log(2, {"critic/rewards/mean": 0.75})
    events = loader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("critic/rewards/mean")] == [(1, 0.25), (2, 0.75)]
    (text,) = events.Tensors("validation samples")
    assert b"| 2 + 3 = ? |" in text.tensor_proto.string_val[0]


def test_tensorboard_has_the_hyperparameters(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    plugin = pytest.importorskip("tensorboard.plugins.hparams.plugin_data_pb2")
    chosen = {"actor.optim.lr": 1e-5, "algorithm.adv_estimator": "grpo"}
    with Tracker(["tensorboard"], tmp_path, "p", "e", {}, 3, hyperparameters=chosen) as run:
        run.log(1, {"critic/rewards/mean": 0.25})
    events = loader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    found = plugin.HParamsPluginData.FromString(content).session_start_info.hparams
    assert found["actor.optim.lr"].number_value == 1e-5
    assert found["algorithm.adv_estimator"].string_value == "grpo"


@pytest.mark.parametrize("name", sorted(SINKS))
def test_another_tracker_gets_metrics_and_samples_and_is_resumed(tmp_path, monkeypatch, name):
    pytest.importorskip(name)  # each is the user's to install
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for variable in ("MLFLOW_TRACKING_URI", "SWANLAB_API_KEY", "SWANLAB_MODE", "CLEARML_API_ACCESS_KEY"):
        monkeypatch.delenv(variable, raising=False)
    with tracker(tmp_path, [name]) as run:
        run.log(1, {"val-core/maths/acc/mean@1": 0.25, "undefined": math.nan})
        run.samples(1, [SAMPLE])
        state = run.state_dict()["sinks"]
    assert state[name]
    with Tracker([name], tmp_path, "project", "experiment", {}, 3, Resume(1, state)) as run:
        run.log(2, {"val-core/maths/acc/mean@1": 0.5})
        assert run.state_dict()["sinks"][name] == state[name]


def test_a_tracker_that_fails_costs_its_metrics_and_one_warning(tmp_path, capsys, monkeypatch):
    class Unreachable(Service):
        def log(self, step: int, metrics: dict[str, float]) -> None:
            raise RuntimeError("the server does not respond")

    monkeypatch.setitem(SINKS, "mlflow", Unreachable)
    with tracker(tmp_path, ["mlflow"]) as run:
        run.log(1, {"a": 1.0})
        run.log(2, {"a": 1.0})
    assert capsys.readouterr().out.count("logger mlflow: the server does not respond") == 1
    assert len(lines(tmp_path)) == 2


def test_wandb_without_a_key_records_offline_without_a_prompt(tmp_path, capsys, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    with tracker(tmp_path, ["wandb"]) as run:
        run.log(1, {"a": 1.0})
        run.samples(1, [SAMPLE])
    assert "recorded offline" in capsys.readouterr().out
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.parametrize("key", ["too-short", "0123456789abcdef" * 2 + "01234567"])
def test_wandb_that_rejects_the_key_or_is_not_reached_records_offline(tmp_path, capsys, monkeypatch, key):
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    with tracker(tmp_path, ["wandb"]) as run:
        run.log(1, {"a": 1.0})
        assert run.state_dict()["sinks"]["wandb"]["id"]
    shown = capsys.readouterr().out
    assert shown.count("warning:") == shown.count("the run is recorded offline; `wandb sync") == 1
    assert key not in shown
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(lines(tmp_path)) == 1


def test_a_tracker_that_cannot_start_costs_its_metrics_and_one_warning(tmp_path, capsys, monkeypatch):
    class Unusable(Service):
        def __init__(self, *_: object) -> None:
            raise RuntimeError("the token hf_abcdefghijklmnop is not valid")

    monkeypatch.setitem(SINKS, "trackio", Unusable)
    (tmp_path / "tensorboard").write_text("a file where the directory would be")
    with tracker(tmp_path, ["trackio", "tensorboard"]) as run:
        run.log(1, {"a": 1.0})
    shown = capsys.readouterr().out
    assert "trainer.logger=trackio: the token *** is not valid; training continues without it" in shown
    assert "trainer.logger=tensorboard: [Errno 17]" in shown and shown.count("warning:") == 2
    assert len(lines(tmp_path)) == 1


def test_a_tracker_that_cannot_be_reached_records_offline(tmp_path, capsys, monkeypatch):
    class Remote(Service):
        offline = "offline in {run_dir}/there"

        def __init__(self, *arguments: object) -> None:
            if not arguments[-1]:
                raise ConnectionError("no route to host")

    monkeypatch.setitem(SINKS, "mlflow", Remote)
    with tracker(tmp_path, ["mlflow"]) as run:
        run.log(1, {"a": 1.0})
    warning = f"trainer.logger=mlflow: no route to host; the run is recorded offline in {tmp_path}/there"
    assert capsys.readouterr().out == f"warning: {warning} [logger-offline]\n"


def test_a_server_that_is_gone_is_not_waited_for_in_each_step(tmp_path, monkeypatch):
    calls = []

    class Gone(Service):
        def log(self, step: int, metrics: dict[str, float]) -> None:
            calls.append(step)
            time.sleep(1)
            raise TimeoutError("the server does not respond")

    monkeypatch.setitem(SINKS, "mlflow", Gone)
    with tracker(tmp_path, ["mlflow"]) as run:
        for step in range(1, 4):
            run.log(step, {"a": 1.0})
    assert calls == [1] and len(lines(tmp_path)) == 3


def test_no_tracker_gets_a_secret(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    given = []

    class Given(Service):
        def __init__(self, *arguments: object) -> None:
            given.append((arguments, [*sys.argv]))

    monkeypatch.setitem(SINKS, "mlflow", Given)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    words = ["main_ppo", "reward.reward_kwargs.api_key=canary-argument", "--token", "canary-option"]
    monkeypatch.setattr(sys, "argv", words)
    config = {"data": {"prompt_key": "question"}, "reward": {"reward_kwargs": {"judge_key": "canary-value"}}}
    chosen = {"own.judge.clientSecret": "canary-chosen", "data.prompt_key": "question"}
    loggers = ["wandb", "tensorboard", "mlflow"]
    with Tracker(loggers, tmp_path, "p", "e", config, 3, hyperparameters=chosen) as run:
        run.log(1, {"a": 1.0})
    assert sys.argv == words
    assert "question" in str(given) and "canary" not in str(given)
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert any(b"question" in content for content in written.values())
    assert any(path.suffix == ".wandb" for path in written)
    assert [path for path, content in written.items() if b"canary" in content] == []


def test_importing_the_package_imports_no_heavy_sink():
    heavy = {"matplotlib", "tensorboard", "wandb", "torch"}
    code = f"import sys, hybridrl.tracking; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


class MlflowWithoutServer:
    """MLflow's client, which puts the files of experiments that it creates by name alone into ./mlruns."""

    def __init__(self) -> None:
        self.places: dict[str, str] = {}
        self.experiment = self.uri = ""

    def set_tracking_uri(self, uri: str) -> None:
        self.uri = uri

    def get_experiment_by_name(self, name: str) -> str | None:
        return self.places.get(name)

    def create_experiment(self, name: str, artifact_location: str) -> None:
        assert name not in self.places
        self.places[name] = artifact_location

    def set_experiment(self, name: str) -> None:
        self.places.setdefault(name, "./mlruns")
        self.experiment = name

    def start_run(self, run_id: str | None, run_name: str | None) -> SimpleNamespace:
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id or run_name))

    def log_dict(self, dictionary: object, file: str) -> None:
        path = Path(self.places[self.experiment], file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(dictionary))


def test_mlflow_without_a_server_writes_into_the_directory_of_the_run_alone(tmp_path, monkeypatch):
    run, elsewhere, client = tmp_path / "run", tmp_path / "elsewhere", MlflowWithoutServer()
    run.mkdir(), elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setitem(sys.modules, "mlflow", client)
    for setting, value in MLFLOW_PATIENCE.items():
        monkeypatch.setenv(setting, value)
    sink = SINKS["mlflow"](run, "project", "name", {"a": 1}, {}, False)
    sink.samples(2, [SampleRow("p", "r", "g", 1.0)])
    resumed = SINKS["mlflow"](run, "project", "name", {"a": 1}, sink.state_dict(), False)
    resumed.samples(4, [])
    assert list(elsewhere.iterdir()) == [] and client.uri == f"sqlite:///{run}/mlflow.db"
    assert sorted(path.name for path in run.rglob("*") if path.is_file()) == ["2.json", "4.json", "config.yaml"]

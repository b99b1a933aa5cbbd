"""A killed run that resumes from a checkpoint: every sink shows one run, without missing or duplicate steps."""

import json
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hybridrl.tracking import Resume, SampleRow, Tracker, draw_curves, read_metrics, summary

REWARD = "critic/rewards/mean"
SAMPLE = SampleRow(prompt="2 + 3 = ?", response="5", ground_truth="5", score=1.0)


def tracker(run_dir: Path, loggers: list[str], resume: Resume | None = None) -> Tracker:
    return Tracker(loggers, run_dir, "project", "experiment", {"seed": 1}, total_steps=5, resume=resume)


def killed_run(run_dir: Path, loggers: list[str], *, saved: int, last: int) -> Resume:
    """Log step / 10 as the reward, save a checkpoint, and stop after a later step without closing anything."""
    run = tracker(run_dir, loggers)
    resume = Resume(0)
    for step in range(1, last + 1):
        run.log(step, {REWARD: step / 10})
        if step == saved:
            resume = Resume(step, json.loads(json.dumps(run.state_dict()["sinks"])))
    return resume


def lines(run_dir: Path) -> list[tuple[int, float]]:
    texts = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [(line["step"], line[REWARD]) for line in map(json.loads, texts)]


EXPECTED = [(1, 0.1), (2, 0.2), (3, 0.33), (4, 0.44)]  # killed at any step after the checkpoint of step 2, then resumed


def finish(run_dir: Path, loggers: list[str], resume: Resume) -> None:
    with tracker(run_dir, loggers, resume) as run:
        for step, value in EXPECTED[resume.step :]:
            run.log(step, {REWARD: value})


@pytest.mark.parametrize("last", [2, 3, 5])
def test_lines_up_to_the_checkpoint_are_kept_and_later_ones_dropped(tmp_path, last):
    resume = killed_run(tmp_path, [], saved=2, last=last)
    finish(tmp_path, [], resume)
    assert lines(tmp_path) == EXPECTED
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_an_incomplete_line_is_dropped(tmp_path):
    resume = killed_run(tmp_path, [], saved=2, last=2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "a')
    finish(tmp_path, [], resume)
    assert lines(tmp_path) == EXPECTED


@pytest.mark.parametrize("bad", ["\0" * 50, "", "nonsense", "[1]", '{"a": 1}', '{"step": 1, "a": "b"}', "\udcff"])
def test_an_unreadable_line_is_skipped_with_one_warning(tmp_path, capsys, bad):
    resume = killed_run(tmp_path, [], saved=2, last=1)
    with (tmp_path / "metrics.jsonl").open("a", errors="surrogateescape") as file:
        file.write(f'{bad}\n{{"step": 2, "{REWARD}": 0.2}}\n')
    finish(tmp_path, [], Resume(2, resume.sinks))
    assert lines(tmp_path) == EXPECTED
    (warning,) = capsys.readouterr().out.splitlines()
    assert warning.startswith(f"warning: {tmp_path}/metrics.jsonl, line 2 cannot be read")
    assert [*read_metrics(tmp_path)] == [1, 2, 3, 4]


def test_all_lines_of_the_checkpoint_step_and_of_step_0_are_kept(tmp_path):
    with tracker(tmp_path, []) as run:
        for step, value in [(0, 0.0), (0, 0.01), (1, 0.1), (1, 0.11), (2, 0.2)]:
            run.log(step, {REWARD: value})
    tracker(tmp_path, [], Resume(1)).close()
    assert lines(tmp_path) == [(0, 0.0), (0, 0.01), (1, 0.1), (1, 0.11)]
    tracker(tmp_path, [], Resume(0)).close()
    assert lines(tmp_path) == [(0, 0.0), (0, 0.01)]


def test_a_kill_while_lines_are_dropped_leaves_the_file_unchanged(tmp_path, monkeypatch):
    resume = killed_run(tmp_path, [], saved=2, last=4)
    before = lines(tmp_path)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            tracker(tmp_path, [], resume)
    assert lines(tmp_path) == before
    finish(tmp_path, [], resume)
    assert lines(tmp_path) == EXPECTED


def test_a_run_that_branches_off_into_a_new_directory_logs_only_later_steps_there(tmp_path):
    killed_run(tmp_path / "old", [], saved=2, last=4)
    finish(tmp_path / "new", [], Resume(2))
    assert lines(tmp_path / "new") == EXPECTED[2:]
    assert len(lines(tmp_path / "old")) == 4


def test_curves_and_summary_cover_all_steps(tmp_path):
    finish(tmp_path, [], killed_run(tmp_path, [], saved=2, last=5))
    assert [(step, metrics[REWARD]) for step, metrics in read_metrics(tmp_path).items()] == EXPECTED
    (row,) = (line.split() for line in summary(tmp_path).splitlines() if line.startswith(REWARD))
    assert row == [REWARD, "0.1", "0.385", "0.44", "(step", "4)"]  # after: the mean of two steps of four
    assert draw_curves(tmp_path) == tmp_path / "curves.png"


def test_the_progress_bar_starts_at_the_checkpoint(tmp_path, terminal):
    with tracker(tmp_path, ["console"], Resume(2)):
        pass
    assert "2/5" in terminal.getvalue()


def scalars(run_dir: Path) -> list[tuple[int, float]]:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = loader.EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return [(event.step, round(event.value, 6)) for event in events.Scalars(REWARD)]


@pytest.mark.parametrize("last", [2, 3, 5])
def test_tensorboard_shows_every_step_once(tmp_path, last):
    finish(tmp_path, ["tensorboard"], killed_run(tmp_path, ["tensorboard"], saved=2, last=last))
    assert scalars(tmp_path) == EXPECTED


def test_tensorboard_shows_every_step_once_after_two_kills_and_an_incomplete_event(tmp_path):
    resume = killed_run(tmp_path, ["tensorboard"], saved=2, last=5)
    (file,) = (tmp_path / "tensorboard").iterdir()
    file.write_bytes(file.read_bytes()[:-7])
    run = tracker(tmp_path, ["tensorboard"], resume)
    run.log(3, {REWARD: 0.9})
    finish(tmp_path, ["tensorboard"], resume)
    assert scalars(tmp_path) == EXPECTED


def test_tensorboard_is_correct_on_a_machine_whose_clock_is_behind(tmp_path, monkeypatch):
    resume = killed_run(tmp_path, ["tensorboard"], saved=2, last=5)
    monkeypatch.setattr("time.time", lambda: 1e9)
    finish(tmp_path, ["tensorboard"], resume)
    assert scalars(tmp_path) == EXPECTED


def test_tensorboard_drops_later_samples_too(tmp_path):
    # The reader of TensorBoard's server; the other one discards scalars only.
    loader = pytest.importorskip("tensorboard.backend.event_processing.plugin_event_accumulator")
    resume = killed_run(tmp_path, ["tensorboard"], saved=2, last=2)
    with tracker(tmp_path, ["tensorboard"], resume) as run:
        run.samples(3, [SAMPLE])
    with tracker(tmp_path, ["tensorboard"], resume) as run:
        run.samples(4, [SAMPLE])
    events = loader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Tensors("validation samples")] == [4]


@dataclass
class Service:
    """Stands in for W&B: accepts steps in order, commits a row when a later step begins or the run is finished."""

    runs: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)
    artifacts: list["Artifact"] = field(default_factory=list)

    def init(self, **arguments: Any) -> "ServiceRun":
        self.calls.append(arguments)
        name = arguments["id"] or f"new-{len(self.runs)}"
        rows = self.runs.setdefault(name, {})
        assert not rows or arguments["resume"] == "allow"
        return ServiceRun(self, name, starting_step=max(rows, default=-1) + 1)


@dataclass
class ServiceRun:
    service: Service
    id: str
    starting_step: int
    pending: tuple[int, dict[str, Any]] | None = None

    def log(self, row: dict[str, Any], step: int) -> None:
        if step < (self.pending[0] if self.pending else self.starting_step):
            self.service.rejected.append(step)
        elif self.pending and step == self.pending[0]:
            self.pending[1].update(row)
        else:
            self.commit()
            self.pending = (step, dict(row))

    def commit(self) -> None:
        if self.pending:
            step, row = self.pending
            assert step not in self.service.runs[self.id], "a duplicate step"
            self.service.runs[self.id][step] = row

    def log_artifact(self, artifact: "Artifact") -> None:
        self.service.artifacts.append(artifact)

    def finish(self) -> None:
        self.commit()
        self.pending = None


class Artifact:
    def __init__(self, name: str, type: str) -> None:
        self.name, self.type, self.files = name, type, []

    def add_file(self, path: str) -> None:
        self.files.append(path)


@pytest.fixture
def service(monkeypatch) -> Iterator[Service]:
    stand_in = Service()
    module = ModuleType("wandb")
    vars(module).update(init=stand_in.init, Settings=dict, Table=dict, Artifact=Artifact)
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delitem(sys.modules, "hybridrl.tracking.wandb_sink", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "a key")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    yield stand_in
    sys.modules.pop("hybridrl.tracking.wandb_sink", None)


def rows(service: Service) -> list[tuple[int, float]]:
    (run,) = service.runs.values()
    return [(step, row[REWARD]) for step, row in run.items()]


def test_a_fresh_wandb_run_is_a_new_one(tmp_path, service):
    with tracker(tmp_path, ["wandb"]) as run:
        run.log(1, {REWARD: 0.1})
        assert run.state_dict() == {"sinks": {"wandb": {"id": "new-0"}}}
    assert service.calls[0]["id"] is None and service.calls[0]["resume"] is None
    with tracker(tmp_path, ["wandb"]) as run:
        run.log(1, {REWARD: 0.5})
    assert [row[1][REWARD] for row in service.runs.values()] == [0.1, 0.5]


def test_the_same_wandb_run_continues_and_its_missing_row_is_logged_again(tmp_path, service):
    resume = killed_run(tmp_path, ["wandb"], saved=2, last=2)
    assert rows(service) == [(1, 0.1)]
    finish(tmp_path, ["wandb"], resume)
    assert rows(service) == EXPECTED
    assert service.rejected == []


def test_steps_that_wandb_has_already_are_kept_with_a_message(tmp_path, service, capsys):
    resume = killed_run(tmp_path, ["wandb"], saved=2, last=4)
    with tracker(tmp_path, ["wandb"], resume) as run:
        for step, value in EXPECTED[2:]:
            run.samples(step, [SAMPLE])
            run.log(step, {REWARD: value})
    assert rows(service) == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.44)]
    assert service.rejected == []
    assert "W&B keeps steps 3 to 3 as they were logged before the run stopped" in capsys.readouterr().out


def test_the_page_of_a_run_is_uploaded_with_it(tmp_path, service):
    with tracker(tmp_path, ["wandb"]) as run:
        run.log(1, {REWARD: 0.1})
        (tmp_path / "report.html").write_text("<html>")
    (artifact,) = service.artifacts
    assert (artifact.name, artifact.files) == ("report-new-0", [f"{tmp_path}/report.html"])


def test_wandb_added_on_resume_gets_the_earlier_steps(tmp_path, service):
    resume = killed_run(tmp_path, [], saved=2, last=4)
    assert resume.sinks == {}
    finish(tmp_path, ["wandb"], resume)
    assert rows(service) == EXPECTED


def recorded(file: Path, messages: ModuleType) -> list[tuple[int, float]]:
    """Return the rows of an offline recording: after 7 bytes, messages each after its (checksum, length, kind)."""
    data, offset, rows = file.read_bytes(), 7, []
    while offset + 7 <= len(data):
        _, length, _ = struct.unpack_from("<IHB", data, offset)
        message = messages.Record.FromString(data[offset + 7 : offset + 7 + length])
        if message.HasField("history"):
            values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in message.history.item}
            rows.append((values["_step"], values[REWARD]))
        offset += 7 + length
    return rows


def test_a_resumed_offline_recording_holds_all_steps_under_its_id(tmp_path, monkeypatch):
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    resume = killed_run(tmp_path, [], saved=2, last=3)
    finish(tmp_path, ["wandb"], Resume(resume.step, {"wandb": {"id": "1a2b3c4d"}}))
    (file,) = tmp_path.glob("wandb/offline-run-*-1a2b3c4d/run-1a2b3c4d.wandb")
    deadline = time.monotonic() + 30
    while file.stat().st_size == 7 and time.monotonic() < deadline:  # written later by a process of W&B
        time.sleep(0.05)
    assert recorded(file, messages) == EXPECTED

"""What is derived from a run's directory: its configuration, how it ended, and which checkpoint a run resumes from."""

import json
import os
from contextlib import closing
from pathlib import Path

import pytest

from hybridrl.checkpoint.store import Store, newest_good
from hybridrl.runs.directory import RunDirectory
from hybridrl.tracking.faults import recording

SHARDS = b"optimizer.state"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four checkpoints, of which the third is not healthy."""
    with closing(Store(tmp_path)) as store:
        for step in (1, 2, 3, 4):
            (store.begin(step) / "actor").mkdir()
            (tmp_path / f".global_step_{step}.writing" / "actor" / ".metadata").write_bytes(SHARDS)
            store.publish(step, {"recovery": False, "healthy": step != 3, "metrics": {}})
    return tmp_path


def resumed_step(directory: Path, *, checksums: bool = False) -> int | None:
    newest = RunDirectory(directory, checksums=checksums).newest
    return newest.step if newest else None


def test_a_configuration_is_read_and_one_that_cannot_be_is_named(tmp_path, capsys):
    assert RunDirectory(tmp_path).config == {}
    (tmp_path / "config.yaml").write_text("trainer: {seed: 3}")
    assert RunDirectory(tmp_path).trainer == {"seed": 3}
    assert capsys.readouterr().out == ""
    (tmp_path / "config.yaml").write_text("trainer: [")
    assert RunDirectory(tmp_path).config == {}
    assert "config.yaml cannot be read" in capsys.readouterr().out


def test_a_run_resumes_from_the_newest_checkpoint_that_is_intact_and_healthy(run):
    shards = run / "global_step_4" / "actor" / ".metadata"
    assert resumed_step(run) == 4
    shards.write_bytes(b"optimizer-state")  # as long as before
    assert (resumed_step(run), resumed_step(run, checksums=True)) == (4, 2)
    shards.write_bytes(b"optimizer.")
    assert resumed_step(run) == 2
    (run / "global_step_2" / "state.json").write_text("{")
    assert resumed_step(run) == 1
    (run / "global_step_1" / "manifest.json").unlink()
    assert resumed_step(run) is None


def test_it_is_the_checkpoint_that_the_store_selects_after_a_run_went_back_too(run):
    with closing(Store(run)) as store:
        (store.begin(2) / "actor").mkdir()
        store.publish(2, {"recovery": False, "healthy": True, "metrics": {}})
    selected = newest_good(run, lambda text: None)
    assert selected is not None and selected.step == 1 == resumed_step(run)
    directory = RunDirectory(run)
    assert directory.saved is not None and directory.saved.step == 2
    assert [one.step for one in directory.checkpoints if one.current] == [1, 2]
    assert directory.checkpoints[1].lacks == "model only" and not directory.checkpoints[1].resumable


def test_a_checkpoint_of_verl_is_resumed_from_where_there_is_no_good_one_of_the_run(run):
    verl = run / "global_step_9" / "actor"
    verl.mkdir(parents=True)
    (verl / "model_world_size_1_rank_0.pt").touch()
    assert resumed_step(run) == 4
    for step in (1, 2, 4):
        (run / f"global_step_{step}" / "manifest.json").unlink()
    assert resumed_step(run) == 9
    compared = RunDirectory(run, checksums=True)
    assert compared.newest is None and "cannot be read" in compared.checkpoints[-1].problem


def test_metrics_of_an_earlier_run_are_not_those_of_the_one_that_was_killed(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(json.dumps({"step": 7, "critic/score/mean": 0.5}) + "\n")
    os.utime(metrics, (1000, 1000))
    with recording(tmp_path):
        record = (tmp_path / "faults.jsonl").read_text()
    (tmp_path / "faults.jsonl").write_text(record)  # its begin alone
    assert RunDirectory(tmp_path).ending == "killed before its first step"
    os.utime(metrics)
    assert RunDirectory(tmp_path).ending == "killed after step 7"

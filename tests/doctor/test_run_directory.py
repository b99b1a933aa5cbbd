import fcntl
import os
import shutil
from pathlib import Path

import pytest

from hybridrl.config import load_ppo_config
from hybridrl.config.findings import Finding, Findings
from hybridrl.doctor.run_directory import check_run_directory
from hybridrl.runs.prepare import prepare


@pytest.fixture
def found(command: list[str]):
    """What is found by code, with further overrides."""

    def ask(*overrides: str) -> dict[str, Finding]:
        config = load_ppo_config([*command, *overrides])
        findings = Findings()
        check_run_directory(config, prepare(config), findings)
        return {finding.code: finding for finding in findings.found}

    return ask


def test_steps_are_counted_and_room_for_them_is_asked(found, tmp_path: Path):
    told = found()
    assert told["run.steps"].cause == "2 prompts, 3 steps: begins anew"
    assert told["run.disk"].cause.startswith("a saved step takes about 1 MiB, and ")
    assert set(told) == {"run.steps", "run.disk"}
    assert not (tmp_path / "run").exists()


def test_nothing_is_said_of_room_where_nothing_is_saved(found):
    assert set(found("trainer.save_freq=-1")) == {"run.steps"}


def test_a_disk_that_cannot_hold_the_steps_is_a_warning(found, monkeypatch: pytest.MonkeyPatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2_500_000))
    # 2 x 320 x 64 + 4 x 64 x 64 + 3 x 64 + 3 x 64 x 32 + 3 x 64 = 63,872 parameters of 12 bytes: 766,464 bytes a step
    told = found("trainer.save_freq=1")["run.disk"]
    assert told.severity == "warning" and "not room for 3 and one that is being written" in told.cause
    assert told.fix == "set trainer.max_actor_ckpt_to_keep=2"
    assert found("trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2")["run.disk"].severity == "information"


def test_a_run_at_work_in_the_directory_is_named(found, tmp_path: Path):
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".lock").open("w") as lock:
        lock.write("process 7 on there")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        told = found()["run.directory"]
    assert told.severity == "refused" and "another run is at work there (process 7 on there)" in told.cause
    assert "run.directory" not in found()  # the lock of a run that has ended


def test_files_of_something_else_are_a_warning(found, tmp_path: Path):
    (tmp_path / "run").mkdir()
    assert "run.directory" not in found()
    (tmp_path / "run" / "thesis.tex").write_text("")
    assert "files of something else (thesis.tex)" in found()["run.directory"].cause
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert "run.directory" not in found()


def test_saved_steps_that_are_not_gone_on_from_are_a_warning(found, tmp_path: Path):
    (tmp_path / "run" / "global_step_9").mkdir(parents=True)
    assert "saved steps, up to global_step_9" in found("trainer.resume_mode=disable")["run.directory"].cause
    assert "is passed over" in found()["run.resume"].cause  # of a damaged one under auto


def test_a_step_that_is_not_there_is_refused(found, tmp_path: Path):
    wanted = f"{tmp_path}/global_step_3"
    told = found("trainer.resume_mode=resume_path", f"trainer.resume_from_path={wanted}")["run.resume"]
    assert told.severity == "refused" and f"trainer.resume_from_path={wanted}" in told.cause


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written_is_refused(found, tmp_path: Path):
    (tmp_path / "run").mkdir(mode=0o500)
    assert found()["run.directory"].severity == "refused"

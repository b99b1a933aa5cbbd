import fcntl
import os
import shutil
from pathlib import Path

import pytest

from hybridrl.config import load_ppo_config
from hybridrl.config.findings import Finding, Findings
from hybridrl.doctor.full import check_run_directory
from hybridrl.runs.prepare import prepare
from hybridrl.runtime.guard import LOG_BYTES


@pytest.fixture
def check(command: list[str]):
    """Findings by code, with further overrides."""

    def run(*overrides: str) -> dict[str, Finding]:
        config = load_ppo_config([*command, *overrides])
        findings = Findings()
        check_run_directory(config, prepare(config), findings)
        return {finding.code: finding for finding in findings.items}

    return run


def test_steps_are_counted_and_their_disk_space_is_checked(check, tmp_path: Path):
    findings = check()
    assert findings["run.steps"].cause == "2 prompts, 3 steps: starting from scratch"
    assert findings["run.disk"].cause.startswith("a checkpoint takes about 1 MiB, and ")
    assert set(findings) == {"run.steps", "run.disk"}
    assert not (tmp_path / "run").exists()


def test_disk_space_is_not_reported_if_nothing_is_saved(check):
    assert set(check("trainer.save_freq=-1", "trainer.ckpt_freq_secs=-1")) == {"run.steps"}


def test_a_disk_that_cannot_hold_the_steps_is_a_warning(check, free_space):
    free_space(2_500_000 + LOG_BYTES)  # what a reward prints
    # 2 x 320 x 64 + 4 x 64 x 64 + 3 x 64 + 3 x 64 x 32 + 3 x 64 = 63,872 parameters of 12 bytes: 766,464 bytes a step
    findings = check("trainer.save_freq=1")["run.disk"]
    assert findings.severity == "warning" and "not enough for 3 and one being written" in findings.cause
    assert findings.fix == "set trainer.max_actor_ckpt_to_keep=2"
    assert "logs/reward.log takes up to 64 MiB" in findings.cause
    assert check("trainer.save_freq=1", "reward.num_workers=0")["run.disk"].severity == "info"
    assert check("trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2")["run.disk"].severity == "info"


def test_the_samples_of_all_steps_count_and_so_does_their_bound(check):
    many = ["trainer.total_training_steps=1000000000000", "trainer.save_freq=-1"]  # more than any disk holds
    unsaved, bound = "trainer.ckpt_freq_secs=-1", "trainer.max_rollout_data_gb"
    warning = check(*many, f"{bound}=null")["run.disk"]
    assert warning.severity == "warning" and "the samples of all steps take up to" in warning.cause
    assert f"set a lower {bound}" in warning.fix
    assert check(*many, f"{bound}=0.01")["run.disk"].severity == "info"
    assert check(*many, unsaved, f"{bound}=null")["run.disk"].severity == "warning"
    assert "run.disk" not in check(*many, unsaved, f"{bound}=null", "trainer.rollout_data_dir=null")


def test_another_run_in_the_directory_is_named(check, tmp_path: Path):
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".lock").open("w") as lock:
        lock.write("process 7 on there")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        findings = check()["run.directory"]
    assert findings.severity == "error" and "another run is using this directory (process 7 on there)" in findings.cause
    assert "run.directory" not in check()  # the lock of a run that has ended


def test_other_files_are_a_warning_but_not_the_rows_of_the_run(check, tmp_path: Path):
    rows = tmp_path / "run" / "data" / "rows.jsonl"
    rows.parent.mkdir(parents=True)
    rows.write_text('{"prompt": "What is 2+2?", "data_source": "none"}')
    assert "run.directory" not in check(f"data.val_files={rows}")
    shutil.rmtree(rows.parent)
    (tmp_path / "run" / "thesis.tex").write_text("")
    assert "files that are not of a run (thesis.tex)" in check()["run.directory"].cause
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert "run.directory" not in check()


def test_checkpoints_that_are_not_resumed_from_are_a_warning_and_nothing_but_damaged_ones_an_error(check, tmp_path):
    (tmp_path / "run" / "global_step_9").mkdir(parents=True)
    assert "checkpoints, up to global_step_9" in check("trainer.resume_mode=disable")["run.directory"].cause
    damaged = check()["run.resume"]
    assert damaged.severity == "error" and "global_step_9 is skipped: manifest.json: missing" in damaged.cause


def test_a_missing_checkpoint_is_an_error(check, tmp_path: Path):
    wanted = f"trainer.resume_from_path={tmp_path}/global_step_3"
    finding = check("trainer.resume_mode=resume_path", wanted)["run.resume"]
    assert finding.severity == "error" and wanted in finding.cause


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_directory_that_is_not_writable_is_an_error(check, tmp_path: Path):
    (tmp_path / "run").mkdir(mode=0o500)
    assert check()["run.directory"].severity == "error"

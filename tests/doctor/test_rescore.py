import json
import shutil
from pathlib import Path

import pytest

from hybridrl.doctor.__main__ import command

REWARD = """
def strict(solution_str, ground_truth, extra_info):
    if solution_str == "none":
        raise KeyError("label")
    return float(solution_str == ground_truth) * (2.0 if extra_info.get("hard") else 1.0)
"""


def record(step: int, position: int, sample: int, score: float, text: str) -> dict:
    known = {"row": position, "position": position, "sample": sample, "sampled_tokens": 1, "stop": "completed"}
    return {"input": "?", "output": text, "gts": "4", "score": score, "step": step, "episode": known}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps: a group whose rewards turn round, and one whose responses all get the same then."""
    steps = {
        1: [record(1, 0, 0, 0.0, "4"), record(1, 0, 1, 1.0, "four")],
        2: [record(2, 1, 0, 1.0, "4"), record(2, 1, 1, 0.0, "4")],
    }
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    for step, records in steps.items():
        lines = "".join(json.dumps(one) + "\n" for one in records)
        (tmp_path / "run" / "rollouts" / f"{step}.jsonl").write_text(lines)
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path / "run"


def causes(capsys: pytest.CaptureFixture, run: Path, *more: str) -> tuple[int, dict[str, list[str]]]:
    """The exit status, and what was found by its code."""
    status = command("rescore", [str(run), "--reward", f"{run.parent / 'reward.py'}:strict", "--json", *more])
    found: dict[str, list[str]] = {}
    for finding in json.loads(capsys.readouterr().out)["findings"]:
        found.setdefault(finding["code"].partition(".")[2], []).append(finding["cause"])
    return status, found


def test_changed_scores_and_turned_advantages_are_reported(run, capsys):
    status, found = causes(capsys, run)
    assert status == 0
    assert found["changed"] == ["3 of 4 samples have another score"]
    first, second = found["step"]
    assert first == "step 1: mean reward 0.500 -> 0.500, 2 changed"
    assert second == "step 2: mean reward 0.500 -> 1.000, 1 changed"
    changed = "4 of 4 advantages change by more than 0.1, 2 of them their sign; 0 were 0, 2 would be 0"
    assert found["advantages"] == [f"by grpo: {changed}"]
    assert found["sample"][0] == "step 1, row 0, sample 0: 1 here, 0 stored; ground truth '4'; response ends '4'"


def test_a_conversation_is_scored_with_the_facts_that_a_run_adds(run, capsys):
    file = run / "rollouts" / "1.jsonl"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "#### 5"}]
    messages += [{"role": "user", "content": "it is #### 4"}, {"role": "assistant", "content": "ok"}]
    read = record(1, 0, 0, 0.0, "#### 5 it is #### 4 ok")
    turns = [{"reward": 0.5, "calls": [{"reward": 2.0}]}, {"reward": None}]
    read["episode"] |= {"messages": messages, "turns": turns, "data_source": "openai/gsm8k"}
    file.write_text(json.dumps(read) + "\n")
    facts = {"written": "#### 5\nok", "num_turns": 2, "turn_scores": [0.5], "tool_rewards": [2.0], "stop": "completed"}
    (run.parent / "own.py").write_text(f"def own(extra_info): return float({facts!r}.items() <= extra_info.items())")
    assert command("rescore", [str(run), "--reward", f"{run.parent}/own.py:own", "--json", "--steps", "1"]) == 0
    assert "step 1: mean reward 0.000 -> 1.000, 1 changed" in capsys.readouterr().out


def test_only_the_steps_that_are_named_are_scored(run, capsys):
    assert causes(capsys, run, "--steps", "2")[1]["changed"] == ["1 of 2 samples have another score"]
    status, found = causes(capsys, run, "--steps", "2,9")
    assert status == 1 and found["rejected"] == ["--steps=2,9: no samples of step 9"]


def test_a_reward_that_fails_is_counted(run, capsys):
    path = run / "rollouts" / "1.jsonl"
    path.write_text(path.read_text().replace("four", "none"))
    status, found = causes(capsys, run)
    assert status == 0 and found["fault"][0].startswith("1 of 4 responses could not be scored")
    assert found["changed"] == ["2 of 4 samples have another score"]
    log = Path(found["fault"][0].rpartition(" ")[2])
    assert "KeyError: 'label'" in log.read_text()
    shutil.rmtree(log.parent)


def test_scores_are_scaled_as_in_the_run(run, capsys):
    (run / "config.yaml").write_text(
        "reward: {scale: 0.5}\ndata: {train_files: [gone.jsonl]}\nactor_rollout_ref: {model: {path: moved/away}}"
    )
    assert causes(capsys, run)[1]["step"][0] == "step 1: mean reward 0.500 -> 0.250, 2 changed"


@pytest.mark.parametrize("form", [dict, json.dumps])
def test_extra_info_and_the_estimator_are_those_of_the_run(run, capsys, monkeypatch, form):
    rows = [{"prompt": "?", "reward_model": {"ground_truth": "4"}, "extra_info": form({"hard": n})} for n in (1, 0)]
    (run.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = ("data: {train_files: [rows.jsonl]}", "algorithm: {adv_estimator: rloo}")
    (run / "config.yaml").write_text("\n".join([*sections, "actor_rollout_ref: {model: {path: moved/away}}"]))
    monkeypatch.chdir(run.parent)
    _, found = causes(capsys, run)
    assert found["step"][0] == "step 1: mean reward 0.500 -> 1.000, 2 changed"
    assert found["advantages"][0].startswith("by rloo: 4 of 4")


def test_a_directory_without_samples_is_rejected(tmp_path, run, capsys):
    (tmp_path / "empty").mkdir()
    assert command("rescore", [str(tmp_path / "empty"), "--reward", f"{tmp_path}/reward.py:strict"]) == 1
    assert "has no samples" in capsys.readouterr().out

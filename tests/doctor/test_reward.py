import json
from pathlib import Path

import pytest

from hybridrl.doctor.__main__ import main

ROWS = [
    {"input": "?", "output": "#### 1", "gts": "1", "score": 1.0, "step": 3},
    {"input": "?", "output": "#### 2", "gts": "1", "score": 1.0, "step": 3},
    {"solution_str": "#### 3", "reward_model": {"ground_truth": "3"}, "data_source": "gsm8k"},
]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "long.py").write_text("def compute_score(solution_str): return float(len(solution_str))")
    (tmp_path / "other.py").write_text(
        "def strict(solution_str, ground_truth):\n"
        "    if ground_truth == '3': raise KeyError('three')\n"
        "    return float(solution_str == '#### 2')\n"
    )
    return tmp_path


def found(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, list[dict]]:
    status = main(["reward", "--json", *arguments])
    return status, json.loads(capsys.readouterr().out)["findings"]


def causes(findings: list[dict], code: str) -> list[str]:
    return [finding["cause"] for finding in findings if finding["code"] == code]


def test_stored_answers_are_scored_and_compared_with_their_stored_scores(files, capsys):
    status, findings = found(capsys, "--rows", str(files / "rows.jsonl"), "--data-source", "gsm8k")
    assert status == 0
    assert "3 answers in" in causes(findings, "reward.scores")[0]
    assert causes(findings, "reward.scores")[0].endswith("mean 0.6667; 0: 1, 1: 2")
    assert causes(findings, "reward.agreement") == ["1 of 2 scores agree with stored"]
    assert causes(findings, "reward.differs") == ["line 2: 0 here, 1 stored; ground truth '1'; answer ends '#### 2'"]


def test_two_reward_files_are_compared_and_faults_are_told(files, capsys):
    long, other = str(files / "long.py"), f"{files / 'other.py'}:strict"
    _, findings = found(capsys, "--rows", str(files / "rows.jsonl"), "--reward", long, "--against", other)
    assert causes(findings, "reward.constant") == [
        "every score is 6: a run learns nothing from answers that are all alike"
    ]
    assert causes(findings, "reward.fault.raised") == [
        f'1 of 3 answers have no score from {other}: fault "raised:KeyError", first at line 3'
    ]
    assert causes(findings, "reward.agreement")[-1] == f"0 of 2 scores agree with {other}"


BATCH = (
    "def many(data_sources, solution_strs, ground_truths, extra_infos, bonus=0): return [bonus] * len(solution_strs)"
)


def test_a_batch_function_is_tried_as_a_run_calls_it(files, capsys):
    directory = files / "it's, =odd"
    directory.mkdir()
    (directory / "my batch.py").write_text(BATCH)
    overrides = ["reward.reward_manager.name=batch", "+reward.reward_kwargs.bonus=3"]
    file = f"{directory / 'my batch.py'}:many"
    status, findings = found(capsys, "--rows", str(files / "rows.jsonl"), "--reward", file, *overrides)
    assert status == 0
    assert causes(findings, "reward.scores")[0].endswith("mean 3.0000; 3: 3")


def test_keys_of_rewards_may_be_set(files, capsys):
    key = "reward.custom_reward_function.reward_kwargs.score=5"
    _, findings = found(capsys, "--rows", str(files / "rows.jsonl"), "--data-source", "gsm8k", key)
    assert causes(findings, "reward.scores")[0].endswith("0: 1, 5: 2")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "no reward is built in for data_source "),
        (["trainer.seed=1"], "trainer.seed=1: give keys of rewards"),
        (["reward.timeot=1"], "unknown key"),
        (["--reward", "missing.py"], "there is no such file"),
        (["reward.reward_manager.name=naiv"], "did you mean naive?"),
    ],
)
def test_what_cannot_be_scored_is_refused_with_the_reason(files, capsys, arguments, told):
    status, findings = found(capsys, "--rows", str(files / "rows.jsonl"), *arguments)
    assert (status, [finding["severity"] for finding in findings]) == (1, ["refused"])
    assert told in findings[0]["cause"]


def test_rows_without_an_answer_are_told_all_at_once(files, capsys):
    (files / "bad.jsonl").write_text('{"gts": "1"}\n{"output": "1"}\n')
    _, findings = found(capsys, "--rows", str(files / "bad.jsonl"))
    text = " ".join(finding["cause"] for finding in findings)
    assert "line 1: no answer (output, " in text and "line 2: no ground truth; the row has output" in text


def test_without_rows_the_usage_is_shown():
    with pytest.raises(SystemExit) as ended:
        main(["reward"])
    assert ended.value.code == 2

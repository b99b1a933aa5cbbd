"""`hybridrl checkpoints`: the list of a run's checkpoints."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from hybridrl.checkpoint.store import Store
from hybridrl.doctor import __main__ as doctor
from hybridrl.doctor.leftovers import list_rows

SCORE = "val-core/math/acc/mean@1"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Five steps: good, best, the one to resume from, not healthy, damaged."""
    with closing(Store(tmp_path)) as store:
        for step, score in enumerate([0.1, 0.5, 0.3, 0.2, 0.4], start=1):
            (store.begin(step) / "weights").write_bytes(bytes(1000))
            state = {"recovery": step == 3, "healthy": step != 4, "metrics": {SCORE: score}}
            store.publish(step, state | {"reason": "entropy fell"} if step == 4 else state)
            if step == 3:  # a later checkpoint would replace it
                (tmp_path / "global_step_3").rename(tmp_path / "aside")
    (tmp_path / "aside").rename(tmp_path / "global_step_3")
    (tmp_path / "global_step_5" / "weights").write_bytes(bytes(999))
    return tmp_path


def test_every_checkpoint_is_listed_with_what_is_wrong_and_which_one_a_run_resumes_from(run):
    rows, name = list_rows(run)
    assert name == SCORE
    assert [(row.step, row.kind, row.score, row.best) for row in rows] == [
        (1, "kept", 0.1, False),
        (2, "kept", 0.5, True),
        (3, "recovery", 0.3, False),
        (4, "kept", 0.2, False),
        (5, "kept", 0.4, False),
    ]
    assert [row.damaged for row in rows] == [[], [], [], [], ["weights: 999 of 1000 bytes"]]
    assert [row.problem for row in rows] == ["", "", "", "entropy fell", ""]
    assert [row.step for row in rows if row.resumes] == [3]
    assert all(1000 < row.size < 3000 and 0 <= row.age < 60 for row in rows)


def test_the_table_shows_it_and_its_json_is_for_programs(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert doctor.command("checkpoints", [str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (resumes,) = [line for line in lines if "a run resumes here" in line]
    assert "recovery" in resumes and "0.3" in resumes
    assert any("damaged: weights: 999 of 1000 bytes" in line for line in lines)
    assert any("not healthy: entropy fell" in line for line in lines) and any("0.5 (best)" in line for line in lines)
    assert doctor.command("checkpoints", [str(run), "--json"]) == 0
    assert [one["step"] for one in json.loads(capsys.readouterr().out)["checkpoints"]] == [1, 2, 3, 4, 5]


def test_the_least_value_is_the_best_where_the_run_says_so(run):
    (run / "config.yaml").write_text(f'trainer: {{keep_best_ckpt: "-{SCORE}"}}')
    assert [row.step for row in list_rows(run)[0] if row.best] == [1]


def test_a_checkpoint_whose_state_cannot_be_read_is_listed_too(run):
    (run / "global_step_1" / "state.json").write_text("{")
    row = list_rows(run)[0][0]
    assert row.kind == "unreadable" and row.damaged[0].startswith("state.json:") and row.score is None


def test_a_directory_without_checkpoints_has_nothing_to_resume_from(tmp_path, capsys):
    assert doctor.command("checkpoints", [str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"{tmp_path} has no checkpoints\n"

"""Before and after training: one pair of figures, wherever a run is described."""

import json
from pathlib import Path

import pytest

from hybridrl.report.contents import Contents
from hybridrl.report.samples import ChosenSamples
from hybridrl.report.sections import health_rows
from hybridrl.report.verdicts import lights, sentence
from hybridrl.tracking import summary
from hybridrl.tracking.report import Change, change_of, run_table

# Twelve steps: the first has 0.2, the last five 0.9, 0.7, 0.8, 1.0, 0.6, whose mean is 0.8.
REWARDS = [0.2, 0.3, 0.4, 0.5, 0.5, 0.6, 0.7, 0.9, 0.7, 0.8, 1.0, 0.6]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    lines = [{"step": 0, "val-core/toy/acc/mean@1": 0.1}]
    lines += [
        {"step": step, "critic/rewards/mean": value, "critic/score/mean": value}
        for step, value in enumerate(REWARDS, 1)
    ]
    lines[6]["val-core/toy/acc/mean@1"], lines[-1]["val-core/toy/acc/mean@1"] = 0.95, 0.85
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_before_is_the_first_step_and_after_the_mean_of_the_last_five_or_of_half_of_a_short_run() -> None:
    assert change_of("critic/rewards/mean", REWARDS) == Change(0.2, pytest.approx(0.8), 5)
    assert change_of("critic/rewards/mean", [0.1, 0.2, 0.4, 0.6, 0.8]) == Change(0.1, pytest.approx(0.7), 2)
    assert change_of("critic/rewards/mean", [0.3]) == Change(0.3, 0.3, 1)
    assert change_of("val-core/toy/acc/mean@1", [0.1, 0.9, 0.5, 0.7]) == Change(0.1, 0.7, 1)
    with pytest.raises(ValueError, match="no values"):
        change_of("critic/rewards/mean", [])


def test_summary_sweep_and_page_show_the_same_pair(run: Path) -> None:
    shown = {line.split()[0]: line.split()[1:3] for line in summary(run).splitlines() if "/" in line}
    assert shown["critic/rewards/mean"] == ["0.2", "0.8"]
    assert shown["val-core/toy/acc/mean@1"] == ["0.1", "0.85"]
    assert "(first step; mean of the last 5)" in summary(run)
    assert run_table({"a": run}).splitlines()[1].split()[4:6] == ["0.2", "0.8"]
    contents = Contents(run)
    assert sentence(contents, {}).startswith("Reward 0.20 → 0.80 over 12 steps; validation 0.10 → 0.85;")
    assert lights(contents, ChosenSamples())[0].reason == "reward 0.20 → 0.80 (first step; mean of the last 5)"
    row = next(row for row in health_rows(contents, ChosenSamples()) if row.code == "flat-score")
    assert (row.start, row.now) == (0.2, pytest.approx(0.8))


def test_a_first_step_unlike_all_others_is_no_clear_change(tmp_path: Path) -> None:
    rewards = [0.9, *[0.1, 0.11] * 3, *[0.5, 0.51] * 4]  # the means of its ends would rise without the first
    lines = [
        {"step": step, "critic/rewards/mean": value} for step, value in enumerate([0.9, 0.1, 0.9, 0.1, *rewards], 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    light = lights(Contents(tmp_path), ChosenSamples())[0]
    assert light.state == "fair"

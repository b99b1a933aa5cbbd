"""docs/extensions.md: its example is accepted as a run accepts it, and its table names keys that exist."""

import re
from pathlib import Path

import pytest

from hybridrl.config.schema import PPOConfig, SFTConfig
from hybridrl.config.values import value_keys
from hybridrl.core.training.optimizer import schedule
from hybridrl.health import History
from hybridrl.health.rules import custom_rules
from hybridrl.runs.trials import custom_sinks, try_schedule, try_sink
from tests.core.training.test_optimizer import config

PAGE = (Path(__file__).parents[2] / "docs" / "extensions.md").read_text(encoding="utf-8")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (code,) = re.findall(r"^```python\n(# my_run.py\n.*?)^```", PAGE, re.M | re.S)
    (tmp_path / "my_run.py").write_text(code)
    return tmp_path / "my_run.py"


def test_the_keys_of_the_table_exist() -> None:
    cells = [line.split(" | ")[1] for line in PAGE.splitlines() if line.startswith("| ")]
    named = {key for cell in cells for key in re.findall(r"`([a-z_]+\.[\w.]+)`", cell)}
    assert len(named) >= 18
    assert named - {*value_keys(PPOConfig), *value_keys(SFTConfig)} == set()


def test_the_page_s_sink_writes_the_best_steps_and_resumes(file: Path, tmp_path: Path) -> None:
    name = f"{file}:Mails"
    try_sink(name, "project", "run")
    assert [*tmp_path.glob("*.best")] == [], "the trial leaves nothing behind"
    make = custom_sinks(["console", name])[name]
    sink = make(tmp_path, "project", "run", {}, {"best": 0.5}, False)
    for step, reward in enumerate((0.4, 0.6, 0.55, 0.7)):
        sink.log(step, {"critic/rewards/mean": reward})
    assert sink.state_dict() == {"best": 0.7}
    sink.close()
    assert (tmp_path / "run.best").read_text() == "step 1: 0.600\nstep 3: 0.700\n"


def test_the_page_s_schedule_halves_the_rate_four_times(file: Path) -> None:
    settings = config(lr_scheduler_type=f"{file}:halved", min_lr_ratio=0.2)
    try_schedule("optim.lr_scheduler_type", settings)
    assert [schedule(update, 8, settings) for update in range(9)] == [1, 1, 0.5, 0.5, 0.25, 0.25, 0.2, 0.2, 0.2]


def test_the_page_s_rule_reports_grading_above_30_percent_of_a_step(file: Path) -> None:
    (rule,) = custom_rules([f"{file}:slow_grader"])
    assert (rule.code, rule.limit) == ("slow-grader", "30% of a step, mean of five")
    history = History()
    for step in range(5):
        history.add(step, {"timing_s/reward": 29.0, "timing_s/step": 100.0})
    assert rule.judge(history) is None
    history.add(5, {"timing_s/reward": 39.0, "timing_s/step": 100.0})
    diagnosis = rule.judge(history)
    assert diagnosis is not None and diagnosis.cause == "grading takes 31 of 100 s"

"""Custom health rules: their code and facts, and that one that fails ends no run."""

import pytest

from hybridrl.health import HealthMonitor, Unhealthy
from hybridrl.health.rules import custom_rules

RULE = """
from hybridrl.health import Diagnosis

def slow_grader(history):
    seconds = history.now("timing_s/reward", 1)
    return Diagnosis(f"grading took {seconds:.0f} s", "raise reward.num_workers") if seconds and seconds > 60 else None

slow_grader.damages = True
slow_grader.explains = ("flat-score",)

def later(history):
    return Diagnosis("late", "none") if history.step == 100 and history.recent[-1]["missing"] else None
"""


@pytest.fixture
def file(tmp_path) -> str:
    (tmp_path / "mine.py").write_text(RULE)
    return f"{tmp_path}/mine.py"


def test_a_custom_rule_has_a_code_facts_and_actions_as_the_built_in_ones(file):
    warned: list[str] = []
    (rule,) = custom_rules([f"{file}:slow_grader"])
    assert (rule.code, rule.damages, rule.explains) == ("slow-grader", True, ("flat-score",))
    monitor = HealthMonitor(
        rules=[rule], warn=lambda text, code: warned.append(f"{text} [{code}]"), actions={"slow-grader": "stop"}
    )
    assert monitor.judge(1, {"timing_s/reward": 9.0}) == {}
    assert monitor.judge(2, {"timing_s/reward": 90.0}) == {"health/slow-grader": 1.0}
    assert warned == ["step 2: grading took 90 s; raise reward.num_workers [slow-grader]"]
    with pytest.raises(Unhealthy, match="grading took 90 s"):
        monitor.act()


def test_a_rule_that_fails_in_a_run_is_turned_off_with_one_warning(file, capsys):
    (rule,) = custom_rules([f"{file}:later"])
    monitor = HealthMonitor(rules=[rule])
    assert [monitor.judge(step, {}) for step in (99, 100, 101)] == [{}, {}, {}]
    (line,) = capsys.readouterr().out.splitlines()
    cause = f"trainer.health_rules={file}:later fails at step 100 and is turned off: KeyError('missing')"
    assert line == f"warning: {cause} [rule-off]"

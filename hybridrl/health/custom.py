"""Custom health rules: functions of the History in a user's file, tried on made-up runs before the start."""

from collections.abc import Callable
from typing import Any

from hybridrl.config import ConfigError
from hybridrl.config.custom_code import call_custom, load_function
from hybridrl.config.values import rule_code
from hybridrl.health.history import Diagnosis, History
from hybridrl.health.rules import Rule
from hybridrl.tracking.console import warn

KEY, PAGE = "trainer.health_rules", "docs/extensions.md"
FACTS = ("limit", "reads", "explains", "damages", "shows")  # attributes that the function may have, fields of Rule
TRIAL = 20  # steps of the longer made-up run


def custom_rules(names: list[str]) -> list[Rule]:
    """Return the rules of these functions, path/to/file.py:function; raises ConfigError if one cannot be used. One
    that fails during the run is turned off with a warning: it only watches."""
    return [_rule(name, _tried(name)) for name in names]


def _rule(name: str, function: Callable[[History], Any]) -> Rule:
    failed: list[str] = []

    def judge(history: History) -> Diagnosis | None:
        if failed:
            return None
        try:
            return function(history)
        except Exception as error:  # whatever the user's code raises
            failed.append(name)
            warn(f"{KEY}={name} fails at step {history.step} and is turned off: {error!r}", "rule-off")
            return None

    facts = {fact: getattr(function, fact) for fact in FACTS if hasattr(function, fact)}
    return Rule(rule_code(name), judge, **facts)


def _tried(name: str) -> Callable[[History], Any]:
    """Return the function once it has judged a run without steps and one with some."""
    function, history = load_function(name, KEY), History()
    for step in range(TRIAL + 1):
        if step:
            history.add(step, _metrics(step))
        found = call_custom(KEY, name, function, history, trial=f"after {step} made-up steps", page=PAGE)
        if found is not None and not isinstance(found, Diagnosis):
            cause = f"{KEY}={name}: after {step} made-up steps it returns {found!r:.60}"
            raise ConfigError(cause, fix="return None, or hybridrl.health.Diagnosis(cause, fix)", keys=KEY)
    return function


def _metrics(step: int) -> dict[str, float]:
    """Return some of a step's metrics, of a run in which all is well."""
    return {
        "critic/score/mean": 0.3 + 0.01 * step,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "actor/entropy": 0.5,
        "actor/grad_norm": 0.3,
        "response_length/mean": 100.0,
        "timing_s/step": 10.0,
    }

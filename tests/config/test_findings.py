"""Findings keep their fields: no message is taken apart, and a rejected key hides only what depends on it."""

import pickle

import pytest

from hybridrl.config import ConfigError, PPOConfig
from hybridrl.config.findings import Finding, Findings
from hybridrl.config.load import resolve_config

ACTOR = "actor_rollout_ref.actor"


def test_a_finding_reads_key_value_cause_and_fix() -> None:
    finding = Finding("conflict", "error", ("a.b",), "3", "must be even; odd numbers leave a rest", "set 4")
    assert finding.text == "a.b=3: must be even; odd numbers leave a rest; set 4"
    assert finding.statement == "a.b=3: must be even; odd numbers leave a rest"
    assert Finding("setting", "warning", ("a.b",), "3", "has no effect").text == "a.b=3 has no effect"
    assert Finding("setting", "warning", ("a.b",), "3", "a.b is odd").text == "a.b is odd"


def test_a_cause_with_semicolons_stays_one_cause() -> None:
    findings = Findings()
    with findings.gathered("data.load"):
        raise ConfigError("rows.jsonl: bad rows; 1: no prompt; 2: no prompt")
    assert findings.items == [Finding("data.load", "error", cause="rows.jsonl: bad rows; 1: no prompt; 2: no prompt")]


def test_an_error_carries_its_findings_through_pickling() -> None:
    findings = Findings()
    findings.error("conflict", "must be even", "set 4", keys="a.b", value=3)
    findings.warn("setting", "is not raised", keys="c")
    findings.error("value", "expected a number", keys="d", value=True)
    with pytest.raises(ConfigError) as caught:
        findings.close()
    assert str(caught.value) == "a.b=3: must be even; set 4\nd=true: expected a number"
    assert pickle.loads(pickle.dumps(caught.value)).findings == tuple(findings.errors)


def test_a_rejected_key_hides_only_findings_about_that_key(needed: list[str]) -> None:
    crossed = [f"{ACTOR}.clip_ratio=-1", f"{ACTOR}.clip_ratio_low=0.3", f"{ACTOR}.clip_ratio_high=0.2"]
    items = resolve_config(PPOConfig, [*needed, *crossed], "ppo_trainer").findings.items
    assert [finding.keys[0] for finding in items if finding.severity == "error"] == [f"{ACTOR}.clip_ratio"]
    assert any("clip_ratio_high=0.2 is less than clip_ratio_low=0.3" in finding.text for finding in items)
    rejected = [f"{ACTOR}.clip_ratio_low=-1", f"{ACTOR}.clip_ratio_high=0.1"]
    items = resolve_config(PPOConfig, [*needed, *rejected], "ppo_trainer").findings.items
    assert [finding.keys[0] for finding in items if "clip_ratio" in finding.text] == [f"{ACTOR}.clip_ratio_low"]


def test_programs_read_the_fields(needed: list[str]) -> None:
    items = resolve_config(PPOConfig, [*needed, "trainer.val_only=true"], "ppo_trainer").findings.errors
    (finding,) = items
    assert (finding.code, finding.keys, finding.value) == ("conflict", ("trainer.val_only", "data.val_files"), "true")
    assert (finding.cause, finding.fix) == ("there is nothing to validate", "set data.val_files")

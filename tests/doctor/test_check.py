import json

from .conftest import Doctor

VALID = (
    "--config-only",
    "data.train_files=/no/train.parquet",
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=5",
    "trainer.n_gpus_per_node=8",
)


def test_a_valid_configuration_is_accepted_with_its_arithmetic(doctor: Doctor) -> None:
    status, output = doctor(*VALID)
    assert status == 0 and "1024 prompts x 5 responses = 5120 samples per step, 4 mini-batches of 256 prompts" in output
    assert output.splitlines()[-1] == "no errors"


def test_findings_have_a_code_a_severity_a_cause_and_a_fix(doctor: Doctor) -> None:
    status, output = doctor("--json", *VALID, "rollout.temprature=1", "trainer.balance_batch=false")
    findings = {finding["code"]: finding for finding in json.loads(output)["findings"]}
    assert status == 1
    assert json.loads(output)["refused"]
    assert findings["unknown-key"]["severity"] == "error"
    assert findings["unknown-key"]["cause"] == "unknown key rollout.temprature"
    assert findings["unknown-key"]["fix"].startswith("nearest: actor_rollout_ref.rollout.temperature")
    assert (findings["ignored-key"]["severity"], findings["not-here"]["severity"]) == ("warning", "info")


def test_a_command_that_cannot_be_parsed_is_a_usage_error(doctor: Doctor) -> None:
    status, output = doctor("--config-onyl", "data.seed=1")
    assert status == 2 and "unknown option --config-onyl" in output


def test_a_run_here_is_checked_with_the_files_and_devices_of_this_machine(doctor: Doctor) -> None:
    status, output = doctor(*VALID[1:], "trainer.device=cpu", "trainer.n_gpus_per_node=1")
    assert status == 1 and "there is no file /no/train.parquet" in output


def test_the_verdict_counts_errors_and_warnings(doctor: Doctor) -> None:
    verdicts = [doctor(*VALID, *more)[1].splitlines()[-1] for more in ((), ("trainer.balance_batch=false",))]
    assert verdicts == ["no errors", "no errors, 1 warning"]
    assert doctor(*VALID, "rollout.temprature=1", "trainer.balance_batch=false")[1].endswith("1 error, 1 warning\n")

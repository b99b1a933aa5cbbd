import json

from .conftest import Doctor

SOUND = (
    "--config-only",
    "data.train_files=/no/train.parquet",
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=5",
    "trainer.n_gpus_per_node=8",
)


def test_a_sound_configuration_is_accepted_with_its_arithmetic(doctor: Doctor) -> None:
    status, told = doctor(*SOUND)
    assert status == 0
    assert "1024 prompts x 5 answers = 5120 samples a step, 4 mini-batches of 256 prompts" in told
    assert told.splitlines()[-1] == "accepted"


def test_findings_have_a_code_a_severity_a_cause_and_a_fix(doctor: Doctor) -> None:
    status, told = doctor("--json", *SOUND, "rollout.temprature=1", "trainer.balance_batch=false")
    found = {finding["code"]: finding for finding in json.loads(told)["findings"]}
    assert status == 1
    assert json.loads(told)["refused"]
    assert found["unknown-key"]["severity"] == "refused"
    assert found["unknown-key"]["cause"] == "unknown key rollout.temprature"
    assert found["unknown-key"]["fix"].startswith("nearest: actor_rollout_ref.rollout.temperature")
    assert (found["ignored-key"]["severity"], found["not-here"]["severity"]) == ("warning", "information")


def test_what_cannot_be_read_as_a_command_is_a_usage_error(doctor: Doctor) -> None:
    status, told = doctor("--config-onyl", "data.seed=1")
    assert status == 2
    assert "unknown option --config-onyl" in told


def test_a_run_here_is_judged_with_the_files_and_devices_of_this_machine(doctor: Doctor) -> None:
    status, told = doctor(*SOUND[1:], "trainer.device=cpu", "trainer.n_gpus_per_node=1")
    assert status == 1
    assert "there is no file /no/train.parquet" in told

from pathlib import Path

import pytest

from .conftest import Doctor

ROLLOUT = "actor_rollout_ref.rollout"


def lines(told: str) -> dict[str, str]:
    return {line[:9].strip(): line[9:] for line in told.splitlines()}


@pytest.mark.parametrize(
    ("words", "value", "set_by", "default"),
    [
        ([f"{ROLLOUT}.n"], "1", "default", "1"),
        ([f"{ROLLOUT}.n", f"{ROLLOUT}.n=4"], "4", f"the command line: {ROLLOUT}.n=4", "1"),
        (["rollout.n", "rollout.n=4"], "4", "the command line: rollout.n=4 (an old name)", "1"),
        (
            ["critic.ppo_epochs", "actor_rollout_ref.actor.ppo_epochs=3"],
            "3",
            "actor_rollout_ref.actor.ppo_epochs, which it follows",
            "follows actor_rollout_ref.actor.ppo_epochs",
        ),
        (["data.train_files"], "must be set", "default", "none"),
    ],
)
def test_a_key_s_value_and_who_set_it(doctor: Doctor, words: list[str], value: str, set_by: str, default: str) -> None:
    status, told = doctor("explain", *words)
    found = lines(told)
    assert (status, found["value"], found["set by"], found["default"]) == (0, value, set_by, default)


def test_a_file_is_named_where_it_sets_the_key(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ndata: {train_batch_size: 8}\n")
    found = lines(doctor("explain", "data.train_batch_size", "-cp", str(tmp_path), "-cn", "mine")[1])
    assert (found["value"], found["set by"], found["unit"]) == ("8", "the file mine.yaml", "prompts")


def test_what_a_key_takes_and_means_is_told(doctor: Doctor) -> None:
    found = lines(doctor("explain", "reward.timeout")[1])
    assert (found["takes"], found["unit"]) == ("a number, more than 0", "seconds")
    assert found["meaning"] == "Seconds one answer may take to score (reward_manager batch: one call)."
    assert lines(doctor("explain", "trainer.device")[1])["takes"] == "auto | cuda | cpu"


def test_a_key_of_verl_that_is_none_here_is_judged(doctor: Doctor) -> None:
    status, told = doctor("explain", "trainer.balance_batch")
    assert status == 0
    assert told.startswith("trainer.balance_batch has no effect (but for true): rows are always balanced")


def test_what_is_no_key_is_a_usage_error_with_the_nearest_ones(doctor: Doctor) -> None:
    status, told = doctor("explain", "data.train_btch")
    assert status == 2
    assert "nearest: data.train_batch_size" in told

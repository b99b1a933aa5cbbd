import signal
from pathlib import Path

import pytest

from .conftest import Doctor


def test_matches_by_name_come_before_those_by_meaning(doctor: Doctor) -> None:
    status, output = doctor("keys", "clip_ratio_c")
    assert status == 0
    assert output.splitlines()[0] == "actor_rollout_ref.actor.clip_ratio_c = 3.0"


def test_keys_of_verl_and_old_names_match_too(doctor: Doctor) -> None:
    output = doctor("keys", "remove_previous")[1]
    assert "trainer.max_actor_ckpt_to_keep=1" in output
    assert "is now critic.fsdp" in doctor("keys", "critic.model.fsdp")[1]


def test_no_match_is_reported(doctor: Doctor) -> None:
    assert doctor("keys", "xyzzy") == (1, "nothing found\n")


def test_a_search_leaves_a_closed_connection_an_error_elsewhere(doctor: Doctor) -> None:
    before = signal.getsignal(signal.SIGPIPE)
    doctor("keys", "clip_ratio")
    doctor("explain", "data.train_batch_size")
    assert signal.getsignal(signal.SIGPIPE) == before != signal.SIG_DFL


# -- explain -----------------------------------------------------------------------------------------------------------


ROLLOUT = "actor_rollout_ref.rollout"


def lines(output: str) -> dict[str, str]:
    return {line[:9].strip(): line[9:] for line in output.splitlines()}


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
def test_a_key_s_value_and_what_set_it(doctor: Doctor, words: list[str], value: str, set_by: str, default: str) -> None:
    status, output = doctor("explain", *words)
    fields = lines(output)
    assert (status, fields["value"], fields["set by"], fields["default"]) == (0, value, set_by, default)


def test_a_file_that_sets_the_key_is_named(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ndata: {train_batch_size: 8}\n")
    fields = lines(doctor("explain", "data.train_batch_size", "-cp", str(tmp_path), "-cn", "mine")[1])
    assert (fields["value"], fields["set by"], fields["unit"]) == ("8", "the file mine.yaml", "prompts")


def test_accepted_values_and_meaning_are_shown(doctor: Doctor) -> None:
    fields = lines(doctor("explain", "reward.timeout")[1])
    assert (fields["takes"], fields["unit"]) == ("a number, more than 0", "seconds")
    assert fields["meaning"] == "Time limit for scoring one response (reward_manager batch: one call), in seconds."
    assert lines(doctor("explain", "trainer.device")[1])["takes"] == "auto | cuda | cpu"


def test_a_verl_key_that_hybridrl_does_not_have_is_explained(doctor: Doctor) -> None:
    status, output = doctor("explain", "trainer.balance_batch")
    assert status == 0
    assert output.startswith("trainer.balance_batch has no effect (except for true): rows are always balanced")


def test_a_key_that_counts_together_with_others_is_explained(doctor: Doctor) -> None:
    status, output = doctor("explain", "actor_rollout_ref.hybrid_engine")
    assert status == 0
    assert output.startswith(
        "actor_rollout_ref.hybrid_engine is translated (except for true): trainer.v1.trainer_mode=separate_async "
    )


def test_an_unknown_key_is_a_usage_error_with_the_nearest_ones(doctor: Doctor) -> None:
    status, output = doctor("explain", "data.train_btch")
    assert status == 2
    assert "nearest: data.train_batch_size" in output


def test_a_metric_is_explained(doctor: Doctor) -> None:
    status, output = doctor("explain", "critic/score/mean")
    fields = {line[:11].strip(): line[11:] for line in output.splitlines()}
    assert (status, [*fields]) == (0, ["metric", "meaning", "healthy", "otherwise", "diagnoses"])
    assert fields["diagnoses"] == "health/no-signal, health/score-fall, health/flat-score"


def test_an_unknown_metric_is_answered_with_the_nearest(doctor: Doctor) -> None:
    status, output = doctor("explain", "actor/entropi")
    assert status == 2
    assert output.startswith("unknown metric actor/entropi; nearest: actor/entropy")

import signal
from pathlib import Path

import pytest

from .conftest import Doctor


def test_matches_by_name_come_before_those_by_meaning(doctor: Doctor) -> None:
    status, output = doctor("explain", "clip_ratio_c")
    assert (status, output.splitlines()[0]) == (0, "actor_rollout_ref.actor.clip_ratio_c = 3.0")


def test_keys_of_verl_and_old_names_match_too(doctor: Doctor) -> None:
    output = doctor("explain", "remove_previous")[1]
    assert "trainer.max_actor_ckpt_to_keep=1" in output
    assert "is now critic.fsdp" in doctor("explain", "critic.model.fsdp")[1]


def test_a_search_shows_the_values_of_the_file_and_the_command(doctor: Doctor, tmp_path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ntrainer: {seed: 77, project_name: mine}\n")
    output = doctor("explain", "trainer.", "trainer.project_name=yours", "-cp", str(tmp_path), "-cn", "mine")[1]
    assert "trainer.seed = 77\n" in output and "trainer.project_name = yours\n" in output


def test_presets_and_metrics_match_too(doctor: Doctor) -> None:
    assert "\n+preset=dr_grpo\n" in doctor("explain", "grpo")[1]
    assert "\nactor/entropy\n" in doctor("explain", "entropy")[1]


def test_a_value_that_is_rejected_is_an_error(doctor: Doctor) -> None:
    status, output = doctor("explain", "trainer.seed", "trainer.seed=x")
    assert status == 1 and "error" in output


def test_no_match_is_reported(doctor: Doctor) -> None:
    status, output = doctor("explain", "xyzzy")
    assert status == 2 and output.startswith("error: unknown key xyzzy; ")


def test_a_search_leaves_a_closed_connection_an_error_elsewhere(doctor: Doctor) -> None:
    before = signal.getsignal(signal.SIGPIPE)
    doctor("explain", "clip_ratio")
    doctor("explain", "data.train_batch_size")
    assert signal.getsignal(signal.SIGPIPE) == before != signal.SIG_DFL


# -- explain -----------------------------------------------------------------------------------------------------------


ROLLOUT, EPOCHS = "actor_rollout_ref.rollout", "actor_rollout_ref.actor.ppo_epochs"


def lines(output: str) -> dict[str, str]:
    return {line[:9].strip(): line[9:] for line in output.splitlines()}


@pytest.mark.parametrize(
    ("words", "value", "set_by", "default"),
    [
        ([f"{ROLLOUT}.n"], "1", "default", "1"),
        ([f"{ROLLOUT}.n", f"{ROLLOUT}.n=4"], "4", f"the command line: {ROLLOUT}.n=4", "1"),
        (["rollout.n", "rollout.n=4"], "4", "the command line: rollout.n=4 (an old name)", "1"),
        (["critic.ppo_epochs", f"{EPOCHS}=3"], "3", f"{EPOCHS}, which it follows", f"follows {EPOCHS}"),
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


def test_a_metric_is_explained(doctor: Doctor) -> None:
    status, output = doctor("explain", "critic/score/mean")
    fields = {line[:11].strip(): line[11:] for line in output.splitlines()}
    assert (status, [*fields]) == (0, ["metric", "meaning", "healthy", "otherwise", "diagnoses"])
    assert fields["diagnoses"] == "health/no-signal, health/score-fall, health/flat-score"


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("trainer.balance_batch", 0, "trainer.balance_batch has no effect (except for true): rows are always balanced"),
        ("actor_rollout_ref.hybrid_engine", 0, "actor_rollout_ref.hybrid_engine is translated (except for true): "
         "trainer.v1.trainer_mode=separate_async "),
        ("data.train_btch", 2, "unknown key data.train_btch; nearest: data.train_batch_size"),
        ("actor/entropi", 2, "unknown metric actor/entropi; nearest: actor/entropy"),
    ],
    ids=["a key of verl alone", "a key that counts together with others", "an unknown key", "an unknown metric"],
)  # fmt: skip
def test_what_is_no_key_here_is_explained(doctor: Doctor, name: str, status: int, said: str) -> None:
    explained = doctor("explain", name)
    assert explained[0] == status and explained[1].rpartition("error: ")[2].startswith(said)

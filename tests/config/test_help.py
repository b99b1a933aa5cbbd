from pathlib import Path

import pytest

from hybridrl.config.compose import CONF
from hybridrl.config.findings import ConfigError
from hybridrl.config.load import explain_keys, hyperparameters, key_meanings, samplings
from hybridrl.config.schema import PPOConfig
from hybridrl.config.values import value_keys

from .conftest import Load


def test_every_key_is_explained_within_the_width() -> None:
    lines = explain_keys("ppo_trainer", "all", (), 90).splitlines()
    assert all(len(line) <= 90 or len(line.split()) == 1 for line in lines)  # a key is whole
    section, found = "", set()
    for line in lines:
        if line and not line.startswith(" "):
            section = line.rstrip(":").replace("outside the sections", "")
        elif line.startswith("  ") and line[2] != " ":
            found.add(f"{section}.{line.split()[0]}".lstrip("."))
    assert found == set(value_keys(PPOConfig))


def test_help_begins_with_a_few_keys_and_the_names_of_the_sections() -> None:
    lines = explain_keys("ppo_trainer", "", ("data.train_files",), 90).splitlines()
    assert max(map(len, lines)) <= 90 and len(lines) < 30
    assert lines[:2] == [
        "keys to begin with:",
        "  data.train_files (must be set)              Training rows: files (.parquet, .json,",
    ]
    assert "more keys, by section (--help SECTION):" in lines and lines[-1].startswith("hybridrl explain KEY")


def test_help_for_a_section_shows_what_is_in_it_and_below() -> None:
    text = explain_keys("ppo_trainer", "reward", (), 100)
    sections = [line for line in text.splitlines() if line and line[0] != " "]
    assert sections[:2] == ["reward:", "reward.custom_reward_function:"]
    assert all(section.startswith("reward") for section in sections)


def test_a_mistyped_section_is_met_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"--help rewards: there is no such section; choose reward\b"):
        explain_keys("ppo_trainer", "rewards", (), 100)


def test_values_are_those_that_hold_where_one_key_follows_another() -> None:
    assert "  response_length = 512 " in explain_keys("ppo_trainer", "all", (), 100)


def test_a_file_that_changes_another_ones_value_has_the_last_word() -> None:
    text = explain_keys("sft_trainer", "optim", (), 100)
    assert "  lr = 1e-05 " in text
    assert "1e-06" not in text


def test_a_meaning_is_the_whole_comment_above_the_key() -> None:
    meanings = key_meanings(CONF / "ppo_trainer.yaml")
    assert meanings["actor_rollout_ref.actor.clip_ratio_low"] == "The lower side by itself; null: clip_ratio."
    assert meanings["reward.reward_manager.name"] == (
        "naive, prime, remote: the function's score | gdpo: the same, for several rewards | dapo: minus a penalty on "
        "responses near the length limit | batch: one call for all responses of a step | group: one for those to a "
        "prompt | rate_limited: within max_concurrent, max_rpm, max_tpm."
    )


def test_only_what_was_changed_is_reported_and_not_what_follows_it(load: Load) -> None:
    text = load("trainer.seed=7", "data.max_response_length=64", "data.val_files=train.jsonl").changed
    yours, chosen = text.removeprefix("set by you:\n").split("\nchosen for this model and machine:\n")
    assert yours.splitlines() == [
        "  data.train_files=[train.jsonl]",
        "  data.val_files=[train.jsonl]",
        "  data.max_response_length=64",
        f"  actor_rollout_ref.model.path={Path('model').absolute()}",
        "  trainer.seed=7",
    ]
    assert {"  trainer.device=cpu", "  actor_rollout_ref.rollout.max_model_len=576"} <= {*chosen.splitlines()}
    keys = [line.strip().partition("=")[0] for line in chosen.splitlines()]
    assert "actor_rollout_ref.rollout.response_length" not in keys
    assert not [key for key in keys if key.startswith("reward")]


def test_the_samplings_of_training_and_validation_stand_side_by_side_and_neither_follows_the_other(load: Load) -> None:
    rollout = "actor_rollout_ref.rollout"
    keys = (f"{rollout}.temperature=0.7", f"{rollout}.n=8", f"{rollout}.top_k=20", f"{rollout}.val_kwargs.top_p=0.9")
    assert samplings(load(*keys).config.actor_rollout_ref.rollout) == (
        "sampling in training: temperature=0.7 top_p=1 top_k=20 n=8; "
        "in validation: temperature=0 top_p=0.9 top_k=-1 n=1"
    )


def test_hyperparameters_are_what_differs_from_the_shipped_values(load: Load) -> None:
    found = hyperparameters(load("actor_rollout_ref.actor.optim.lr=3e-5", "data.seed=7").config)
    assert found["actor_rollout_ref.actor.optim.lr"] == 3e-5 and found["data.seed"] == 7
    assert not {"actor_rollout_ref.rollout.n", "trainer.default_local_dir"} & {*found}


@pytest.mark.parametrize("width", [60, 80])
def test_no_word_is_cut_where_the_terminal_is_narrow(width):
    meanings = " ".join(key_meanings(CONF / "ppo_trainer.yaml").values())
    words = {word for word in meanings.split() if len(word) > 20}
    assert words and words <= {*explain_keys("ppo_trainer", "all", (), width).split()}

from hybridrl.config.compose import CONF
from hybridrl.config.help import changed_values, explain_keys, key_meanings, samplings
from hybridrl.config.keys import value_keys
from hybridrl.config.schema import PPOConfig

from .conftest import Load


def test_every_key_is_explained_within_the_width() -> None:
    lines = explain_keys("ppo_trainer", ("data.train_files",), 90).splitlines()
    assert max(map(len, lines)) <= 90
    assert lines[:2] == [
        "keys to begin with:",
        "  data.train_files (must be set)              Training rows: files (.parquet, .json,",
    ]
    section, found = "", set()
    for line in lines:
        if line and not line.startswith(" "):
            section = line.rstrip(":").replace("outside the sections", "")
        elif line.startswith("  ") and line[2] != " " and section != "keys to begin with":
            found.add(f"{section}.{line.split()[0]}".lstrip("."))
    assert found == set(value_keys(PPOConfig))


def test_values_are_those_that_hold_where_one_key_follows_another() -> None:
    assert "  response_length = 512 " in explain_keys("ppo_trainer", (), 100)


def test_a_file_that_changes_another_ones_value_has_the_last_word() -> None:
    text = explain_keys("sft_trainer", ("optim.lr",), 100)
    assert "  optim.lr = 1e-05 " in text
    assert "1e-06" not in text


def test_a_meaning_is_the_whole_comment_above_the_key() -> None:
    meanings = key_meanings(CONF / "ppo_trainer.yaml")
    assert meanings["actor_rollout_ref.actor.clip_ratio_low"] == "The lower side by itself; null: clip_ratio."
    assert meanings["reward.reward_manager.name"] == (
        "naive, prime, remote: the function's score | gdpo: the same, for several rewards | dapo: minus a penalty on "
        "responses near the length limit | batch: one call for all responses | rate_limited: within max_concurrent, "
        "max_rpm, max_tpm."
    )


def test_only_what_was_changed_is_reported_and_not_what_follows_it(load: Load) -> None:
    lines = changed_values(load("trainer.seed=7", "data.max_response_length=64", "data.val_files=train.jsonl").config)
    sections = dict(line.strip().split(": ", 1) for line in lines.splitlines())
    assert sections["data"] == "train_files=[train.jsonl], val_files=[train.jsonl], max_response_length=64"
    assert sections["trainer"].startswith("device=cpu, n_gpus_per_node=")
    assert "response_length" not in sections["actor_rollout_ref"]
    assert "rollout.max_model_len=576" in sections["actor_rollout_ref"]
    assert "seed=7" in sections["trainer"]
    assert "reward" not in sections


def test_the_samplings_of_training_and_validation_stand_side_by_side_and_neither_follows_the_other(load: Load) -> None:
    rollout = "actor_rollout_ref.rollout"
    keys = (f"{rollout}.temperature=0.7", f"{rollout}.n=8", f"{rollout}.top_k=20", f"{rollout}.val_kwargs.top_p=0.9")
    assert samplings(load(*keys).config) == (
        "sampling in training: temperature=0.7 top_p=1 top_k=20 n=8; "
        "in validation: temperature=0 top_p=0.9 top_k=-1 n=1"
    )

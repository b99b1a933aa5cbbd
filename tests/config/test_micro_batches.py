import pytest

from hybridrl.config import ConfigError

from .conftest import Load

ACTOR = "actor_rollout_ref.actor"
TWO_DEVICES = "trainer.n_gpus_per_node=2"


def test_rows_over_all_devices_become_rows_a_device_and_it_is_said(load: Load) -> None:
    loaded = load(TWO_DEVICES, f"{ACTOR}.ppo_micro_batch_size=9", "rollout.log_prob_micro_batch_size=1")
    section = loaded.config.actor_rollout_ref
    assert (section.actor.ppo_micro_batch_size_per_gpu, section.actor.ppo_micro_batch_size) == (4, None)
    assert section.rollout.log_prob_micro_batch_size_per_gpu == 1
    assert (
        f"{ACTOR}.ppo_micro_batch_size=9 is now {ACTOR}.ppo_micro_batch_size_per_gpu=4 (over 2 devices)" in loaded.notes
    )


def test_values_are_computed_in_the_passes_of_the_critic_s_update_unless_they_have_their_own(load: Load) -> None:
    critic = load(TWO_DEVICES, "critic.ppo_micro_batch_size=8").config.critic
    assert (critic.ppo_micro_batch_size_per_gpu, critic.forward_micro_batch_size_per_gpu) == (4, 4)
    critic = load("critic.ppo_micro_batch_size_per_gpu=8", "critic.forward_micro_batch_size_per_gpu=2").config.critic
    assert (critic.ppo_micro_batch_size_per_gpu, critic.forward_micro_batch_size_per_gpu) == (8, 2)


def test_both_forms_at_once_are_rejected(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"set ppo_micro_batch_size_per_gpu only"):
        load(f"{ACTOR}.ppo_micro_batch_size=8", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4")


def test_a_token_budget_below_the_longest_row_is_warned_of(load: Load) -> None:
    key = f"{ACTOR}.ppo_max_token_len_per_gpu"
    lengths = ("data.max_prompt_length=32", "data.max_response_length=64")
    (note,) = [note for note in load(*lengths, f"{key}=20").notes if note.startswith(key)]
    assert note == (
        f"{key}=20: a row may have 96 tokens: each that is longer is computed alone, which takes longer; set {key}=96"
    )
    assert not [note for note in load(*lengths, f"{key}=96").notes if note.startswith(key)]
    rows = (f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4")
    assert not [note for note in load(*lengths, *rows, f"{key}=20").notes if note.startswith(key)], "rows are counted"

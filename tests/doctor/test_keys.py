from .conftest import Doctor


def test_keys_are_found_by_name_before_those_by_meaning(doctor: Doctor) -> None:
    status, told = doctor("keys", "clip_ratio_c")
    assert status == 0
    assert told.splitlines()[0] == "actor_rollout_ref.actor.clip_ratio_c = 3.0"


def test_keys_of_verl_and_old_names_are_found_too(doctor: Doctor) -> None:
    told = doctor("keys", "remove_previous")[1]
    assert "trainer.max_actor_ckpt_to_keep=1" in told
    assert "is now critic.fsdp" in doctor("keys", "critic.model.fsdp")[1]


def test_nothing_found_is_said(doctor: Doctor) -> None:
    assert doctor("keys", "xyzzy") == (1, "nothing found\n")

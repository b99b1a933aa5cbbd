import pytest

from hybridrl.compat.translation import VERL
from hybridrl.config.compose import nearest_keys
from hybridrl.config.findings import nearest
from hybridrl.config.schema import PPOConfig
from hybridrl.config.values import value_keys

KEYS = value_keys(PPOConfig)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("data.train_bach_size", "data.train_batch_size"),
        ("data.training_batch_size", "data.train_batch_size"),
        ("train_files", "data.train_files"),
        ("lr", "actor_rollout_ref.actor.optim.lr"),
        ("actor_rollout_ref.actor.lr", "actor_rollout_ref.actor.optim.lr"),
        ("actor_rollout_ref.rollout.tensor_parallel_size", "actor_rollout_ref.rollout.tensor_model_parallel_size"),
        ("trainer.save_frequency", "trainer.save_freq"),
        ("trainer.epochs", "trainer.total_epochs"),
        ("reward.path", "reward.custom_reward_function.path"),
        ("algorithm.kl_coef", "algorithm.kl_ctrl.kl_coef"),
    ],
)
def test_the_key_that_was_meant_comes_first(typed: str, meant: str) -> None:
    assert nearest(typed, KEYS)[0] == meant


def test_nothing_is_offered_where_nothing_is_alike() -> None:
    assert nearest("own.thing", KEYS) == []


def test_a_name_of_trl_is_met_with_the_key_of_its_meaning() -> None:
    assert nearest_keys("num_generations", PPOConfig) == "TRL's num_generations is actor_rollout_ref.rollout.n here"
    assert not [key for key in VERL.trl_names.values() if key not in KEYS]

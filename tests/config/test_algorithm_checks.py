from pathlib import Path

import pytest

from hybridrl.algorithms.estimators import ESTIMATORS
from hybridrl.algorithms.policy_losses import AGGREGATIONS, POLICY_LOSSES
from hybridrl.config import ConfigError, values
from hybridrl.config.algorithm_checks import GROUP_ESTIMATORS, OWN_AGGREGATION

from .conftest import Load


def test_every_name_that_may_be_chosen_has_its_function() -> None:
    assert set(values.ESTIMATORS) == set(ESTIMATORS)
    assert set(values.POLICY_LOSSES) == set(POLICY_LOSSES) - {"likelihood", "reinforce"}, "these have no key"
    assert set(ESTIMATORS) > GROUP_ESTIMATORS
    assert set(AGGREGATIONS) == OWN_AGGREGATION


def test_ppo_brings_a_critic_like_the_policy(load: Load) -> None:
    config = load("data.train_batch_size=8").config
    assert config.algorithm.adv_estimator == "gae"
    assert config.critic.enable is True
    assert config.critic.model.path == config.actor_rollout_ref.model.path == str(Path("model").absolute())
    assert config.critic.optim.lr == 1e-5
    assert config.critic.ppo_mini_batch_size == 8
    assert config.critic.loss_scale_factor == config.data.max_response_length


def test_an_own_estimator_may_ask_for_a_critic(load: Load) -> None:
    Path("own.py").touch()
    config = load("algorithm.adv_estimator=own.py:f", "critic.enable=true").config
    assert config.critic.enable is True
    assert load("algorithm.adv_estimator=own.py:f").config.critic.enable is False


def test_a_critic_of_its_own_is_judged_by_its_own_config(load: Load) -> None:
    Path("value").mkdir()
    Path("value", "config.json").write_text('{"max_position_embeddings": 512}')
    Path("value", "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"critic\.model\.path=value: the model takes 512"):
        load("critic.model.path=value")


def test_the_reference_starts_as_the_policy_does(load: Load) -> None:
    config = load().config
    assert config.actor_rollout_ref.ref.model.path == config.actor_rollout_ref.model.path


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ["critic.enable=false"],
            "critic.enable=false: algorithm.adv_estimator=gae needs a critic; set algorithm.adv_estimator=grpo",
        ),
        (
            [
                "algorithm.adv_estimator=optimal_token_baseline",
                "algorithm.rollout_correction.bypass_mode=true",
            ],
            "algorithm.rollout_correction.bypass_mode=true: algorithm.adv_estimator=optimal_token_baseline needs the "
            "trainer's own probabilities, which that mode does not compute; set "
            "algorithm.rollout_correction.bypass_mode=false",
        ),
        (
            ["actor_rollout_ref.actor.policy_loss.loss_mode=dro"],
            "actor_rollout_ref.actor.policy_loss.loss_mode=dro: the weight of its penalty has no default; set "
            "actor_rollout_ref.actor.policy_loss.dro_beta=0.1",
        ),
        (
            ["algorithm.adv_estimator=gdpo"],
            "algorithm.adv_estimator=gdpo: name the parts of the reward that it normalises one by one, such as "
            "algorithm.gdpo_reward_keys=[format,accuracy]; the reward function returns them in its dict",
        ),
        (
            [
                "algorithm.adv_estimator=gdpo",
                "algorithm.gdpo_reward_keys=[a,b]",
                "algorithm.gdpo_reward_weights=[1.0]",
            ],
            "algorithm.gdpo_reward_weights: 1 weights for 2 algorithm.gdpo_reward_keys; give one weight a key, or none",
        ),
        (
            ["reward.reward_manager.name=dapo", "reward.reward_kwargs.overlong_buffer_cfg.enable=true"],
            "reward.reward_kwargs.overlong_buffer_cfg.len=4096: answers have at most max_resp_len=512 tokens; set a "
            "part of that, such as 102",
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_the_way_out(load: Load, keys: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*keys)
    assert str(caught.value) == message

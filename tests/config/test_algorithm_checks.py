"""The checks of the algorithm's keys, and the catalog that they read."""

from inspect import signature
from pathlib import Path
from typing import get_args

import pytest

from hybridrl.config import ConfigError
from hybridrl.config.catalog import ACTOR_KEYS, ESTIMATOR_KEYS, ESTIMATORS, PARAMETERS, POLICY_LOSSES
from hybridrl.config.compose import shipped
from hybridrl.config.schema_parts import RejectionForm
from hybridrl.core.algorithms.algorithm import find_estimator, find_policy_loss, imported

from .conftest import Load, errors_of


def keywords(*functions) -> set[str]:
    parameters = [item for function in functions for item in signature(function).parameters.values()]
    return {item.name for item in parameters if item.kind is item.KEYWORD_ONLY}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_takes_the_keys_of_its_entry(name: str) -> None:
    entry, function = find_estimator(name)
    assert keywords(function) == set(entry.keys)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_policy_loss_and_its_token_selector_take_the_keys_and_parameters_of_the_entry(name: str) -> None:
    entry, function = find_policy_loss(name)
    functions = [function] if entry.token_selector is None else [function, imported(entry.token_selector)]
    assert keywords(*functions) == {*entry.keys, *entry.parameters}


def test_every_key_of_the_catalog_has_a_value_in_conf_null_if_it_must_be_set() -> None:
    values = shipped("ppo_trainer").values
    assert set(ESTIMATOR_KEYS) <= values["algorithm"].keys()
    actor = values["actor_rollout_ref"]["actor"]
    assert set(ACTOR_KEYS) <= actor.keys()
    assert actor["policy_loss"].keys() == {"loss_mode", *PARAMETERS}
    required = {name for name, parameter in PARAMETERS.items() if parameter.suggestion is not None}
    assert required == {name for name in PARAMETERS if actor["policy_loss"][name] is None}


def test_ppo_has_a_critic_like_the_policy(load: Load) -> None:
    config = load("data.train_batch_size=8").config
    assert config.algorithm.adv_estimator == "gae"
    assert config.critic.enable is True
    assert config.critic.model.path == config.actor_rollout_ref.model.path == str(Path("model").absolute())
    assert config.critic.optim.lr == 1e-5
    assert config.critic.ppo_mini_batch_size == 8
    assert config.critic.loss_scale_factor == config.data.max_response_length


def test_a_custom_estimator_may_use_a_critic(load: Load) -> None:
    Path("own.py").touch()
    config = load("algorithm.adv_estimator=own.py:f", "critic.enable=true").config
    assert config.critic.enable is True
    assert load("algorithm.adv_estimator=own.py:f").config.critic.enable is False


def test_a_critic_of_another_model_is_checked_by_its_own_config(load: Load) -> None:
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
            ["algorithm.adv_estimator=optimal_token_baseline", "algorithm.rollout_correction.bypass_mode=true"],
            "algorithm.rollout_correction.bypass_mode=true: algorithm.adv_estimator=optimal_token_baseline needs the "
            "trainer's own probabilities, which that mode does not compute; set "
            "algorithm.rollout_correction.bypass_mode=false",
        ),
        (
            ["actor_rollout_ref.actor.policy_loss.loss_mode=dro"],
            "actor_rollout_ref.actor.policy_loss.loss_mode=dro: dro_beta has no default; set "
            "actor_rollout_ref.actor.policy_loss.dro_beta=0.1",
        ),
        (
            ["algorithm.adv_estimator=gdpo"],
            "algorithm.adv_estimator=gdpo: name the reward components that it normalizes one by one, such as "
            "algorithm.gdpo_reward_keys=[format,accuracy]; the reward function returns them in its dict",
        ),
        (
            [
                "algorithm.adv_estimator=gdpo",
                "algorithm.gdpo_reward_keys=[a,b]",
                "algorithm.gdpo_reward_weights=[1.0]",
            ],
            "algorithm.gdpo_reward_weights: 1 weights for 2 algorithm.gdpo_reward_keys; give one weight per key, or "
            "none",
        ),
        (
            ["reward.reward_manager.name=dapo", "reward.reward_kwargs.overlong_buffer_cfg.enable=true"],
            "reward.reward_kwargs.overlong_buffer_cfg.len=4096: responses have at most max_resp_len=512 tokens; set a "
            "part of that, such as 102",
        ),
    ],
)  # fmt: skip
def test_invalid_combinations_are_rejected_with_a_fix(load: Load, keys: list[str], message: str) -> None:
    assert errors_of(load, *keys) == [message]


CORRECTION = "algorithm.rollout_correction"
RATIO = "does not bound a ratio of probabilities: give an upper bound of at least 1, such as 2.0, or a lower and an "
RATIO += "upper one around 1, such as '0.5_5.0' (0.5_5 without quotes is read as the number 0.55)"


@pytest.mark.parametrize(
    ("text", "bounds"),
    [("2.0", (None, 2.0)), ("3", (None, 3.0)), ("0.5_5.0", (0.5, 5.0)), ("1e-3_1e3", (1e-3, 1e3))],
)
def test_a_threshold_is_an_upper_bound_or_two(load: Load, text: str, bounds: tuple) -> None:
    config = load(f"{CORRECTION}.rollout_is_threshold='{text}'").config
    assert config.algorithm.rollout_correction.weight_bounds == bounds


@pytest.mark.parametrize(
    "text", ["two", "0.55", "-1", "0.5_0.9", "1.1_2.0", "-0.5_2.0", "0_2", "0.5_0.7_3.0", "nan", "inf", "true"]
)
def test_a_threshold_that_equal_probabilities_would_exceed_is_rejected(load: Load, text: str) -> None:
    key = f"{CORRECTION}.rollout_is_threshold"
    assert errors_of(load, f"{key}='{text}'") == [f"{key}={text}: '{text}' {RATIO}"]


@pytest.mark.parametrize(
    ("forms", "thresholds", "error"),
    [
        ("token_k1,token_k2", "", "0 bounds for rollout_rs=token_k1,token_k2: give one for all or one for each"),
        ("token_k1,token_k2", "1,2,3", "3 bounds for rollout_rs=token_k1,token_k2"),
        ("token_k2", "0.5_2", "'0.5_2' does not bound token_k2: give one positive number, such as 0.01"),
        ("token_k3", "-1.0", "'-1.0' does not bound token_k3"),
        ("seq_max_k2", "much", "'much' does not bound seq_max_k2"),
        ("token_k1", "0.01", f"'0.01' {RATIO}"),
        ("token_k1,token_k2", "0.5_2", "'0.5_2' does not bound token_k2"),
    ],
)
def test_thresholds_that_do_not_fit_their_rejections_are_rejected(load: Load, forms, thresholds, error) -> None:
    keys = f"{CORRECTION}.rollout_rs='{forms}'", f"{CORRECTION}.rollout_rs_threshold='{thresholds}'"
    (line,) = errors_of(load, *keys)
    assert line.startswith(f"{CORRECTION}.rollout_rs_threshold=") and f": {error}" in line


@pytest.mark.parametrize("name", ["seq_max_k1", "geometric"])
def test_an_unknown_rejection_is_rejected_with_all_that_are_known(load: Load, name: str) -> None:
    (line,) = errors_of(load, f"{CORRECTION}.rollout_rs={name}", f"{CORRECTION}.rollout_rs_threshold=2")
    assert line.startswith(f"{CORRECTION}.rollout_rs={name}: choose {' | '.join(get_args(RejectionForm))}")

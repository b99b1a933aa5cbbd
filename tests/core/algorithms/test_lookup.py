"""Custom estimators and policy losses: their facts, and the parameters that they receive."""

import pytest
import torch

from hybridrl.config import ConfigError
from hybridrl.core.algorithms.algorithm import bind, find_estimator, find_policy_loss

VALUES = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "dro_beta": 0.5, "gamma": 0.9}


def loss_of(directory, text: str):
    file = directory / "mine.py"
    file.write_text(text)
    return f"{file}:loss"


def test_a_keyword_argument_receives_the_key_of_its_name() -> None:
    def loss(log_probs, batch, *, clip_ratio_high, sharpness=2.0):
        return log_probs, batch, clip_ratio_high, sharpness

    assert bind(loss, VALUES, rows=2)(1, 2) == (1, 2, 0.3, 2.0)


def test_a_further_positional_argument_receives_a_namespace_of_all_values_by_key_and_by_older_names() -> None:
    def loss(log_probs, batch, settings):
        return settings.clip_low, settings.clip_ratio_high, settings.dro_weight

    def estimator(batch, numbers):
        return numbers.gamma

    assert bind(loss, VALUES, rows=2)(1, 2) == (0.1, 0.3, 0.5)
    assert bind(estimator, VALUES)(1) == 0.9


def test_the_older_names_of_all_keys_in_a_namespace() -> None:
    keys = {
        "norm_adv_by_std_in_grpo": "normalise",
        "gdpo_reward_weights": "part_weights",
        "clip_ratio_low": "clip_low",
        "clip_ratio_high": "clip_high",
        "clip_ratio_c": "clip_dual",
        "tau_pos": "tau_positive",
        "tau_neg": "tau_negative",
        "clip_cov_ratio": "clip_cov_share",
        "clip_cov_lb": "clip_cov_least",
        "clip_cov_ub": "clip_cov_most",
        "kl_cov_ratio": "kl_cov_share",
        "ppo_kl_coef": "kl_cov_weight",
        "dro_beta": "dro_weight",
    }
    values = {key: float(number) for number, key in enumerate(keys)}
    settings = vars(bind(lambda batch, settings: settings, values)(None))
    assert settings == values | {older: values[key] for key, older in keys.items()}


def test_facts_are_attributes_of_the_function(tmp_path) -> None:
    text = "def loss(log_probs, batch): return -log_probs, {}\n"
    facts = "loss.by_token = True\nloss.aggregation = 'seq-mean-token-mean'\n"
    selector = "def select(batch, generator): return batch.response_mask\nloss.token_selector = select\n"
    entry, _ = find_policy_loss(loss_of(tmp_path, text + facts + selector))
    assert (entry.by_token, entry.aggregation, entry.clips_ratio) == (True, "seq-mean-token-mean", None)
    assert callable(entry.token_selector)


def test_without_attributes_the_least_is_assumed(tmp_path) -> None:
    name = loss_of(tmp_path, "def loss(log_probs, batch): return -log_probs, {}\n")
    assert not find_policy_loss(name)[0].by_token
    assert find_estimator(name)[0].reads == ()


@pytest.mark.parametrize(
    ("fact", "find", "message"),
    [
        ("reads = ('rewards',)", find_estimator, "adv_estimator=.*attribute reads names .rewards.; choose.*values"),
        ("aggregation = 'mean'", find_policy_loss, "loss_mode=.*aggregation names 'mean'; choose.*token-mean"),
    ],
)
def test_an_unknown_fact_is_rejected_with_the_valid_ones(tmp_path, fact, find, message) -> None:
    name = loss_of(tmp_path, f"def loss(log_probs, batch): return -log_probs, {{}}\nloss.{fact}\n")
    with pytest.raises(ConfigError, match=message):
        find(name)


def test_a_custom_estimator_runs_with_the_values_of_the_configuration(make_batch) -> None:
    def doubled(batch, settings):
        return batch.token_rewards * 2, torch.full_like(batch.token_rewards, settings.gamma)

    batch = make_batch([2], token_rewards=[0.0, 1.0])
    advantages, returns = bind(doubled, {"gamma": 0.5})(batch)
    assert advantages.tolist() == [0, 2] and returns.tolist() == [0.5, 0.5]

"""Custom estimators and losses on made-up groups: what works passes, what no step could use is named."""

from types import SimpleNamespace

import pytest

from hybridrl.config import ConfigError
from hybridrl.config.catalog import ESTIMATORS, POLICY_LOSSES
from hybridrl.core.algorithms.algorithm import bind, find_estimator
from hybridrl.runs.trials import TRIALS, Subject, try_estimator, try_policy_loss
from tests.core.algorithms.parameters import ESTIMATOR_PARAMETERS, LOSS_PARAMETERS


def write(directory, text: str, name: str) -> str:
    (directory / "mine.py").write_text(f"import torch\n{text}\n")
    return f"{directory}/mine.py:{name}"


def estimator(directory, body: str, samples: int = 2) -> tuple:
    name = write(directory, f"def mine(batch, settings):\n    {body}", "mine")
    return try_estimator(name, bind(find_estimator(name)[1], {"gamma": 0.5}), samples, parts=0)


def loss(directory, body: str) -> tuple:
    name = write(directory, f"def mine(log_probs, batch, settings):\n    {body}", "mine")
    return try_policy_loss(name, {"clip_ratio_high": 0.2})


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_of_the_catalog_passes(name):
    function = bind(find_estimator(name)[1], ESTIMATOR_PARAMETERS)
    advantages, returns, metrics = try_estimator(
        name, function, samples=3, parts=len(ESTIMATOR_PARAMETERS["gdpo_reward_weights"])
    )
    assert advantages.shape == returns.shape == (12,) and metrics == {}


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_a_custom_estimator_sees_groups_of_the_run_s_size(tmp_path, samples):
    body = f"assert len(batch) == {2 * samples} and settings.gamma == 0.5\n    return (batch.token_rewards,) * 2"
    advantages, *_ = estimator(tmp_path, body, samples)
    assert advantages.sum() > 0


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("return batch.rewards, batch.rewards", r"advantages is a tensor \[4\]; return advantages and returns"),
        ("return batch.token_rewards", r"it returns a tensor \[9\]"),
        ("return batch.token_rewards, None", "returns is NoneType"),
        ("return batch.token_rewards / 0, batch.token_rewards", "advantages is not finite"),
        ("return (batch.token_rewards,) * 2 + ({'a': 'b'},)", "its metrics are {'a': 'b'}; return a dict of numbers"),
        ("return (batch.token_rewards,) * 2 + (1.0,)", "its metrics are 1.0"),
        ("return batch.scores, 0", r"fails on made-up groups: AttributeError: .*'scores' \(.*mine.py:3\)"),
    ],
)
def test_an_estimator_that_no_step_could_use_is_rejected_with_its_line_or_what_to_return(tmp_path, body, cause):
    with pytest.raises(ConfigError, match=f"algorithm.adv_estimator=.*mine.py:mine.*{cause}"):
        estimator(tmp_path, body)


def test_a_custom_estimator_may_log_numbers(tmp_path):
    body = "return batch.token_rewards, batch.token_rewards, {'best': batch.rewards.max()}"
    assert estimator(tmp_path, body)[2] == {"best": 1.0}


@pytest.mark.parametrize(("parts", "columns"), [(0, 1), (1, 1), (3, 3)])
def test_a_custom_estimator_sees_as_many_reward_components_as_the_run_has(tmp_path, parts, columns):
    body = "return (batch.token_rewards * batch.reward_parts.shape[1],) * 2\nmine.reads = ('reward_parts',)"
    name = write(tmp_path, f"def mine(batch):\n    {body}", "mine")
    advantages, *_ = try_estimator(name, find_estimator(name)[1], 2, parts)
    assert advantages.max() == columns


def test_a_custom_loss_is_tried_with_its_gradient(tmp_path):
    per_token, gradient = loss(tmp_path, "return -batch.advantages * log_probs, {'gain': batch.advantages}")
    assert per_token.shape == (9,)
    # Responses of 3, 1, 2 and 3 tokens with advantages of either sign, large and small.
    assert gradient.tolist() == [-1, -1, -1, 1, -0.5, -0.5, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("return -batch.advantages * log_probs", r"it returns a tensor \[9\]; return the loss"),
        ("return (batch.advantages * log_probs).mean(), {}", r"the loss is a tensor \[\]"),
        ("return -batch.advantages, {}", "its loss does not depend on the log-probs"),
        (
            "return batch.advantages * torch.ones(1, requires_grad=True), {}",
            "its loss does not depend on the log-probs",
        ),
        ("return log_probs.detach().sqrt() + log_probs, {}", "the loss is not finite"),
        ("return (log_probs - batch.old_log_probs).abs().sqrt() * 0 + log_probs * batch.rewards, {}", "TypeError"),
    ],
)
def test_a_loss_that_no_update_could_use_is_rejected(tmp_path, body, cause):
    with pytest.raises(ConfigError, match=f"policy_loss.loss_mode=.*mine.py:mine.*{cause}"):
        loss(tmp_path, body)


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("return log_probs * batch.per_row(batch.advantages)[batch.response_row], {}", "it returns another loss"),
        ("return log_probs * torch.cat([*batch.padded(batch.advantages)])[: len(log_probs)], {}", "fails on some of"),
    ],
)
def test_a_loss_that_reads_other_tokens_is_rejected_if_it_states_that_it_does_not(tmp_path, body, cause):
    with pytest.raises(ConfigError, match=f"policy_loss.loss_mode=.*mine.py:mine.*{cause}"):
        loss(tmp_path, f"{body}\nmine.by_token = True")


def test_a_loss_by_token_knows_the_row_of_a_token(tmp_path):
    loss(tmp_path, "return log_probs * batch.response_lengths[batch.response_row], {}\nmine.by_token = True")


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_loss_of_the_catalog_passes(name):
    per_token, gradient = try_policy_loss(name, LOSS_PARAMETERS)
    assert per_token.shape == gradient.shape == (9,)


@pytest.mark.parametrize("enable", [False, True])
def test_a_trial_applies_where_its_key_names_a_custom_function(enable):
    trainer = SimpleNamespace(logger=["console", "mine.py:Sink"], health_rules=[])
    critic = SimpleNamespace(enable=enable, optim=SimpleNamespace(lr_scheduler_type="mine.py:half"))
    config = SimpleNamespace(trainer=trainer, critic=critic, optim=SimpleNamespace(lr_scheduler_type="cosine"))
    applying = [trial.key for trial in TRIALS if trial.applies(Subject(config))]
    assert applying == ["trainer.logger", *["critic.optim.lr_scheduler_type"] * enable]

from dataclasses import replace

import pytest
import torch

from hybridrl.config.catalog import Estimator
from hybridrl.core.algorithms import Algorithm
from hybridrl.core.algorithms.algorithm import Signal, loss_terms
from hybridrl.core.algorithms.objective import KLWeight
from hybridrl.core.algorithms.rollout_correction import Rejection, RolloutCorrection
from hybridrl.required import required
from tests.core.algorithms.parameters import estimator

grpo, centred = estimator("grpo"), estimator("grpo", norm_adv_by_std_in_grpo=False)


@pytest.fixture
def scored(make_batch):
    """Two answers to one prompt, of 2 tokens and of 1; k1 of the tokens is 0.5, 0 and -0.5."""
    return make_batch(
        [2, 1],
        group=[0, 0],
        rewards=[1.0, 0.0],
        old_log_probs=[-1.0, -2.0, -1.0],
        reference_log_probs=[-1.5, -2.0, -0.5],
    )


def test_the_score_lies_on_the_last_token_of_each_answer_of_a_new_batch(scored):
    batch, metrics = Algorithm(centred).advantages(scored)
    assert scored.advantages is None and scored.token_rewards is None
    assert required(batch.token_rewards).tolist() == [0, 1, 0]
    assert required(batch.advantages).tolist() == required(batch.returns).tolist() == [0.5, 0.5, -0.5]
    assert metrics == {}


def test_a_kl_penalty_is_taken_off_each_token(scored):
    algorithm = Algorithm(centred, kl_in_reward="kl", kl_weight=KLWeight(0.1))
    batch, metrics = algorithm.advantages(scored)
    # Rows: 1 - 0.1 * 0.5 = 0.95 and 0 + 0.1 * 0.5 = 0.05; their mean is 0.5.
    assert required(batch.token_rewards).tolist() == pytest.approx([-0.05, 1, 0.05])
    assert required(batch.advantages).tolist() == pytest.approx([0.45, 0.45, -0.45])
    # Means of the rows: 0.25 and -0.5.
    assert metrics == {"actor/reward_kl_penalty": pytest.approx(-0.125), "actor/reward_kl_penalty_coeff": 0.1}


def test_a_custom_estimator_that_changes_its_rows_changes_nothing_else(scored):
    def estimator(rows):
        rows.token_rewards += 7
        rows.response_mask[:] = False
        rows.old_log_probs.zero_()
        return rows.token_rewards, rows.token_rewards

    name = "mine.py:estimator"
    batch, _ = Algorithm(estimator, Estimator(name, name)).advantages(scored)
    assert required(batch.token_rewards).tolist() == [0, 1, 0] and required(batch.response_mask).all()
    assert required(batch.old_log_probs).tolist() == [-1, -2, -1]
    assert required(batch.advantages).tolist() == [7, 8, 7]


def test_tokens_that_the_policy_did_not_write_bear_no_penalty(scored):
    scored.response_mask = torch.tensor([False, True, True])
    scored.reference_log_probs[0] = float("nan")
    batch, metrics = Algorithm(grpo, kl_in_reward="k1", kl_weight=KLWeight(0.1)).advantages(scored)
    assert required(batch.token_rewards).tolist() == pytest.approx([0, 1, 0.05])
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(-0.25)


def test_an_adaptive_weight_is_steered_for_the_next_step(scored):
    weight = KLWeight(0.1, target=0.1, horizon=10)
    algorithm = Algorithm(grpo, kl_in_reward="abs", kl_weight=weight)
    # The rows' means are 0.25 and 0.5, far above the target: the weight grows by 0.2 * 2 samples / 10.
    _, metrics = algorithm.advantages(scored)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.375)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1
    assert weight.value == pytest.approx(0.1 * 1.04)


def test_rewards_a_token_are_taken_as_they_are(scored):
    scored.token_rewards = torch.tensor([0.25, 0.5, -1.0])
    batch, _ = Algorithm(centred).advantages(scored)
    assert required(batch.token_rewards).tolist() == [0.25, 0.5, -1.0]
    assert required(batch.advantages).tolist() == [0.875, 0.875, -0.875]


def test_the_exact_kl_is_taken_off_where_the_form_is_full(scored):
    scored.reference_kl = torch.tensor([0.5, 0.0, 1.0])
    algorithm = Algorithm(centred, kl_in_reward="full", kl_weight=KLWeight(0.1))
    batch, metrics = algorithm.advantages(scored)
    assert required(batch.token_rewards).tolist() == pytest.approx([-0.05, 1, -0.1])
    assert metrics["actor/reward_kl_penalty"] == pytest.approx((0.25 + 1.0) / 2)


@pytest.mark.parametrize(
    ("in_reward", "in_loss", "old_log_probs"),
    [(None, None, False), ("kl", None, True), (None, "k3", False), ("full", None, True), (None, "full", False)],
)
def test_the_models_and_the_first_forward_pass_follow_from_both_forms_of_kl(in_reward, in_loss, old_log_probs):
    signals = (Signal(("reference_log_probs",), "reference"),) if {in_reward, in_loss} & {"kl", "k3"} else ()
    algorithm = Algorithm(grpo, kl_in_reward=in_reward, terms=loss_terms("gpg", 0.0, in_loss), signals=signals)
    assert algorithm.models == (["actor", "reference"] if in_reward or in_loss else ["actor"])
    assert algorithm.needs_old_log_probs is old_log_probs


@pytest.mark.parametrize(
    ("asked", "needed"),
    [
        ({"kl_in_reward": "kl"}, False),
        ({"entry": Estimator("", "", reads=("sum_pi_squared",))}, False),
        ({"entry": Estimator("", "", reads=("old_log_probs",))}, False),
        ({"kl_in_reward": "full"}, True),
    ],
)
def test_in_bypass_mode_only_the_exact_kl_needs_the_trainer_before_the_update(asked, needed):
    assert Algorithm(grpo, **asked).needs_old_log_probs
    assert Algorithm(grpo, **asked, bypass=True).needs_old_log_probs is needed


def test_an_estimator_alone_needs_no_critic_and_nothing_of_a_reference():
    algorithm = Algorithm(grpo)
    assert algorithm.models == ["actor"] and not algorithm.needs_old_log_probs
    assert algorithm.state_dict() == {"kl_weight": 0.0}


def correction(level="token"):
    return RolloutCorrection(level, None, 2.0, False, ())


def test_importance_weights_come_from_the_difference_to_the_rollout(scored):
    scored.rollout_log_probs = torch.tensor([-1.0, -2.5, -1.5])
    algorithm = Algorithm(centred, correction=correction())
    batch, metrics = algorithm.advantages(scored)
    assert required(batch.importance_weights).tolist() == pytest.approx([1.0, 1.64872, 1.64872], abs=1e-5)
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(1.64872, abs=1e-5)


def test_a_kl_penalty_and_importance_weights_both_have_metrics(scored):
    scored.rollout_log_probs = torch.tensor([-1.0, -2.5, -1.5])
    algorithm = Algorithm(centred, kl_in_reward="kl", kl_weight=KLWeight(0.1), correction=correction())
    metrics = algorithm.advantages(scored)[1]
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(-0.125)
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(1.64872, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "needed"),
    [
        (RolloutCorrection("sequence", None, 2.0, False, ()), False),
        (RolloutCorrection("token", None, 2.0, True, ()), True),  # the mean over all rows divides the weights
        (RolloutCorrection(None, None, 2.0, False, (Rejection("token_k2", None, 0.5),)), True),  # the rest is counted
    ],
)
def test_weights_that_need_no_other_row_are_left_to_an_update_whose_log_probs_are_the_old_ones(scored, kind, needed):
    algorithm = Algorithm(centred, correction=kind)
    assert algorithm.needs_old_log_probs is needed
    if not needed:
        batch, metrics = algorithm.advantages(replace(scored, old_log_probs=None))
        assert batch.importance_weights is None and metrics == {}


def test_in_bypass_mode_the_correction_is_left_to_the_loss(scored):
    scored.rollout_log_probs = torch.tensor([-1.0, -2.5, -1.5])
    batch, metrics = Algorithm(centred, correction=correction(), bypass=True).advantages(scored)
    assert batch.importance_weights is None
    assert metrics == {}


# Two answers of two tokens to one prompt, with scores 1 and 0: the returns are 1, 1, 0, 0. Less the critic's 0.5, or
# their mean, whitening divides 0.5 by the deviation sqrt(1/3). The greedy answer's score is 0.25. Each token's W is the
# same in both rows, so that the token baselines are 0.5, as is that of both rows' lengths.
HIGH, LOW = 0.75**0.5, -(0.75**0.5)


@pytest.mark.parametrize(
    ("name", "advantages"),
    [
        ("gae", [HIGH, 0, LOW, LOW]),
        ("reinforce_plus_plus", [HIGH, 0, LOW, LOW]),
        ("reinforce_plus_plus_baseline", [HIGH, 0, LOW, LOW]),
        ("remax", [0.75, 0, -0.25, -0.25]),
        ("optimal_token_baseline", [0.5, 0, -0.5, -0.5]),
        ("tir_optimal_token_baseline", [0.5, 0, -0.5, -0.5]),
        ("opo", [0.5, 0, -0.5, -0.5]),
    ],
)
def test_an_answer_whose_last_token_is_rejected_keeps_its_score(make_batch, name, advantages):
    batch = make_batch(
        [2, 2],
        group=[0, 0],
        rewards=[1.0, 0.0],
        greedy_rewards=[0.25, 0.25],
        values=[0.5] * 4,
        old_log_probs=torch.full((4,), 0.5).log(),
        rollout_log_probs=torch.tensor([0.5, 0.05, 0.5, 0.5]).log(),
        sum_pi_squared=[0.5] * 4,
    )
    rejecting = RolloutCorrection(None, None, 2.0, False, (Rejection("token_k2", None, 0.5),))
    learnt, _ = Algorithm(estimator(name), correction=rejecting).advantages(batch)
    assert required(learnt.response_mask).tolist() == [True, False, True, True]
    assert required(learnt.advantages).tolist() == pytest.approx(advantages, abs=1e-6)
    if name in ("gae", "reinforce_plus_plus", "remax"):
        assert required(learnt.returns).tolist() == pytest.approx([1, 0, 0, 0], abs=1e-6)


def test_the_weight_of_the_kl_penalty_is_its_state(scored):
    algorithm, resumed = (Algorithm(grpo, kl_weight=KLWeight(weight)) for weight in (0.25, 0.1))
    resumed.load_state_dict(algorithm.state_dict())
    assert resumed.kl_weight.value == 0.25


def test_the_entry_states_what_the_rollout_has_to_provide():
    assert "greedy_rewards" in Algorithm(grpo, Estimator("", "", reads=("greedy_rewards",))).entry.reads
    assert "greedy_rewards" not in Algorithm(grpo).entry.reads


def test_the_metrics_that_a_custom_estimator_returns_are_logged(scored):
    def mine(batch):
        return batch.token_rewards, batch.token_rewards, {"best": batch.token_rewards.max()}

    assert Algorithm(estimator=mine).advantages(scored)[1] == {"algorithm/best": 1.0}

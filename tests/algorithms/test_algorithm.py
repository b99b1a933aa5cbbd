import pytest
import torch

from hybridrl.algorithms import Algorithm
from hybridrl.algorithms.grpo import grpo
from hybridrl.algorithms.kl import KLWeight


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


def test_the_score_lies_on_the_last_token_of_each_answer(scored):
    batch, metrics = Algorithm(grpo, normalise=False).advantages(scored)
    assert batch.token_rewards.tolist() == [0, 1, 0]
    assert batch.advantages.tolist() == batch.returns.tolist() == [0.5, 0.5, -0.5]
    assert metrics == {}


def test_the_batch_given_stays_as_it_is(scored):
    Algorithm(grpo).advantages(scored)
    assert scored.advantages is None and scored.token_rewards is None


def test_a_kl_penalty_is_taken_off_each_token(scored):
    algorithm = Algorithm(grpo, normalise=False, kl_in_reward="kl", kl_weight=KLWeight(0.1))
    batch, metrics = algorithm.advantages(scored)
    # Rows: 1 - 0.1 * 0.5 = 0.95 and 0 + 0.1 * 0.5 = 0.05; their mean is 0.5.
    assert batch.token_rewards.tolist() == pytest.approx([-0.05, 1, 0.05])
    assert batch.advantages.tolist() == pytest.approx([0.45, 0.45, -0.45])
    # Means of the rows: 0.25 and -0.5.
    assert metrics == {
        "actor/reward_kl_penalty": pytest.approx(-0.125),
        "actor/reward_kl_penalty_coeff": 0.1,
    }


def test_tokens_that_the_policy_did_not_write_bear_no_penalty(scored):
    scored.response_mask = torch.tensor([False, True, True])
    scored.reference_log_probs[0] = float("nan")
    batch, metrics = Algorithm(grpo, kl_in_reward="k1", kl_weight=KLWeight(0.1)).advantages(scored)
    assert batch.token_rewards.tolist() == pytest.approx([0, 1, 0.05])
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(-0.25)


def test_an_adaptive_weight_is_steered_for_the_next_step(scored):
    weight = KLWeight(0.1, target=0.1, horizon=10)
    algorithm = Algorithm(grpo, kl_in_reward="abs", kl_weight=weight)
    # The rows' means are 0.25 and 0.5, far above the target: the weight grows by 0.2 * 2 samples / 10.
    _, metrics = algorithm.advantages(scored)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.375)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1
    assert weight.value == pytest.approx(0.1 * 1.04)


@pytest.mark.parametrize(
    ("in_reward", "in_loss", "uses_reference", "penalises_reward"),
    [(None, False, False, False), ("kl", False, True, True), (None, True, True, False), ("kl", True, True, True)],
)
def test_a_reference_is_used_where_either_form_of_kl_is(in_reward, in_loss, uses_reference, penalises_reward):
    algorithm = Algorithm(grpo, kl_in_reward=in_reward, kl_in_loss=in_loss)
    assert (algorithm.uses_reference, algorithm.penalises_reward) == (uses_reference, penalises_reward)


def test_an_own_estimator_is_a_function_of_the_batch_and_of_whether_to_normalise(scored):
    def first_token_only(batch, normalise):
        return batch.token_rewards * 2, torch.full_like(batch.token_rewards, float(normalise))

    batch, _ = Algorithm(first_token_only, normalise=False).advantages(scored)
    assert batch.advantages.tolist() == [0, 2, 0]
    assert batch.returns.tolist() == [0, 0, 0]

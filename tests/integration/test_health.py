"""Faults of training in real runs, each with the diagnosis that names it in time; series of other runs are in
tests/health."""

import pytest

from tests.integration.test_run import finish, metrics, start

DISTINCT = "len(set(solution_str)) / max(len(solution_str), 1)"
GAE = {"algorithm.adv_estimator": "gae"}
# By the diagnosis: what the reward gives to the response with this number, further keys, the step from which it is
# wrong, and the last step that may report it.
FAULTS = {
    "score-fall": (f"{DISTINCT} * (1.0 if number <= 12 * 32 else 0.02)", {}, 13, 16),
    "value-loss-rise": (f"{DISTINCT} * (1.0 if number <= 12 * 32 else 30.0)", GAE, 13, 16),
}


@pytest.mark.drill
@pytest.mark.parametrize("code", ["score-fall", "value-loss-rise"])
def test_a_fault_of_training_is_reported_within_steps(code, overrides, tmp_path):
    reward, keys, begins, latest = FAULTS[code]
    (tmp_path / "reward.py").write_text(
        "from itertools import count\nNUMBERS = count(1)\n"
        "def compute_score(solution_str, ground_truth, **_):\n    number = next(NUMBERS)\n    return " + reward
    )
    keys = keys | {
        "reward.custom_reward_function.path": tmp_path / "reward.py",
        "actor_rollout_ref.actor.optim.lr": 1e-4,
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": latest,
    }
    output = finish(start("main_ppo", overrides(tmp_path / "run", keys)))
    reported = [step for step, values in metrics(tmp_path / "run").items() if values.get(f"health/{code}")]
    assert begins <= min(reported, default=0) <= latest, output
    assert f"[{code}]" in output

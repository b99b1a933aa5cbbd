"""Lack of memory on one rank of two: the run goes on, and ends with the parameters of one that has enough."""

import json

import pytest

from tests.integration.test_resume import weights_and_moments
from tests.integration.test_run import finish, start

pytestmark = pytest.mark.slow

# Loaded by every worker: in these calls, rank 1 has no memory for a micro-batch of more than 300 tokens.
CALLS = ("values", "update_policy")
LITTLE_MEMORY = f"""
import sys
import torch
learner = sys.modules.get("hybridrl.training.learner")
if learner is not None:
    inputs = learner.Learner.inputs

    def limited(self, rows):
        frame, callers = sys._getframe(1), set()
        while frame := frame.f_back:
            callers.add(frame.f_code.co_name)
        if int(rows.lengths.sum()) > 300 and torch.distributed.get_rank() == 1 and callers & set({CALLS}):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return inputs(self, rows)

    learner.Learner.inputs = limited
"""
KEYS = {
    "log_probs": "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
    "reference_log_probs": "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
    "values": "critic.forward_max_token_len_per_gpu",
    "update_critic": "critic.ppo_max_token_len_per_gpu",
    "update_policy": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
}


def test_a_run_whose_rank_lacks_memory_ends_as_one_that_has_enough(overrides, tmp_path):
    (tmp_path / "little_memory.py").write_text(LITTLE_MEMORY)

    def arguments(name: str, **more: object) -> list[str]:
        values = {
            "algorithm.adv_estimator": "gae",
            "actor_rollout_ref.actor.use_kl_loss": True,
            "actor_rollout_ref.actor.ppo_epochs": 2,
            "actor_rollout_ref.actor.use_dynamic_bsz": True,
            # With Adam's usual epsilon, an element whose gradient is rounding alone would move as far as any other.
            "actor_rollout_ref.actor.optim.override_optimizer_config": "{eps: 1e-3}",
            "critic.optim.override_optimizer_config": "{eps: 1e-3}",
            "actor_rollout_ref.actor.checkpoint.save_contents": "[model,optimizer,extra]",
            "trainer.save_freq": 1,
        }
        return overrides(tmp_path / name, values | more)

    finish(start("main_ppo", arguments("enough")))
    little = arguments("little", **{"actor_rollout_ref.model.external_lib": tmp_path / "little_memory.py"})
    output = finish(start("main_ppo", little))
    keys = sorted(KEYS[call] for call in CALLS)
    assert all(f"starting again from the last checkpoint with {key}=" in output for key in keys)
    enough, lacking = (weights_and_moments(tmp_path / name, 2) for name in ("enough", "little"))
    gaps = {name: float((enough[name] - lacking[name]).abs().max()) for name in enough if "exp_avg" not in name}
    assert max(gaps.values()) < 1e-6
    state = json.loads((tmp_path / "little" / "global_step_2" / "state.json").read_text())
    assert sorted(state["adjusted"]) == keys

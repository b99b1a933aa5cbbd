"""Lack of memory on one rank of two, in each call of a step: the run goes on, and ends with the same parameters."""

import json

import pytest

from tests.integration.test_resume import weights_and_moments
from tests.integration.test_run import finish, start

pytestmark = pytest.mark.slow

# Loaded by every worker: rank 1 has no memory for a micro-batch of more than 300 tokens, whatever it is for.
LITTLE_MEMORY = """
import sys
import torch
learner = sys.modules.get("hybridrl.training.learner")
if learner is not None:
    inputs = learner.Learner.inputs

    def limited(self, rows):
        if int(rows.lengths.sum()) > 300 and torch.distributed.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return inputs(self, rows)

    learner.Learner.inputs = limited
"""
LOWERED = [
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
    "critic.forward_max_token_len_per_gpu",
    "critic.ppo_max_token_len_per_gpu",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
]


def test_a_run_whose_rank_lacks_memory_in_every_call_ends_as_one_that_has_enough(overrides, tmp_path):
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

    undisturbed = start("main_ppo", arguments("enough"))
    finish(undisturbed)
    output = finish(
        start(
            "main_ppo", arguments("little", **{"actor_rollout_ref.model.external_lib": tmp_path / "little_memory.py"})
        )
    )
    for key in LOWERED:
        assert output.count(f"starting again from the last checkpoint with {key}=") >= 1
    ends = [weights_and_moments(tmp_path / name, 2) for name in ("enough", "little")]
    gaps = {name: float((ends[0][name] - ends[1][name]).abs().max()) for name in ends[0] if "exp_avg" not in name}
    assert max(gaps.values()) < 1e-6
    state = json.loads((tmp_path / "little" / "global_step_2" / "state.json").read_text())
    assert sorted(state["adjusted"]) == sorted(LOWERED)

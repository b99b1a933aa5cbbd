"""Rank 1 of 2 has too little memory in one call of a step, and is killed in the same call of the next step: the run
continues, and ends with the parameters of one that nothing happened to."""

from pathlib import Path

import pytest

from tests.integration.test_resume import weights_and_moments
from tests.integration.test_run import finish, start

pytestmark = pytest.mark.drill

KEYS = {
    "update_policy": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "forward actor": "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
    "forward reference": "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
    "forward critic": "critic.forward_max_token_len_per_gpu",
    "update_critic": "critic.ppo_max_token_len_per_gpu",
}

# Loaded by every worker: in CALL, of MODEL if it is a forward pass, rank 1 has no memory for a micro-batch of more than
# 300 tokens, and ends by
# itself, once, when the first step has been logged.
FAULTS = """
import os, signal, sys
from pathlib import Path

import torch

learner = sys.modules.get("hybridrl.core.training.learner")
if learner is not None:
    inputs = learner.ModelShard.inputs

    def in_call():
        frame = sys._getframe()
        while frame and not (frame.f_code.co_name == CALL and frame.f_locals.get("name", MODEL) == MODEL):
            frame = frame.f_back
        return frame is not None

    def disturbed(self, rows):
        if torch.distributed.get_rank() == 1 and in_call():
            if int(rows.lengths.sum()) > 300:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            log, mark = Path(RUN, "metrics.jsonl"), Path(RUN + ".killed")
            if '"step": 1,' in log.read_text() and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return inputs(self, rows)

    learner.ModelShard.inputs = disturbed
"""


@pytest.fixture(scope="module")
def run(overrides):
    def run(directory: Path, *more: str) -> str:
        values = {
            "algorithm.adv_estimator": "gae",
            "actor_rollout_ref.actor.use_kl_loss": "False",
            "algorithm.use_kl_in_reward": "True",
            "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
            # With Adam's usual epsilon, an element whose gradient is rounding alone would move as far as any other.
            "actor_rollout_ref.actor.optim.override_optimizer_config": "{eps: 1e-3}",
            "critic.optim.override_optimizer_config": "{eps: 1e-3}",
            "trainer.save_freq": 1,
            "trainer.max_restarts": 1,
        }
        return finish(start("main_ppo", [*overrides(directory, values), *more]))

    return run


@pytest.fixture(scope="module")
def undisturbed(run, tmp_path_factory):
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    run(directory)
    return weights_and_moments(directory, 2)


@pytest.mark.parametrize("call", KEYS)
def test_a_rank_without_memory_and_then_killed_in_one_call_costs_nothing(run, undisturbed, tmp_path, call):
    faults = tmp_path / "faults.py"
    method, _, model = call.partition(" ")
    faults.write_text(f"CALL, MODEL, RUN = {method!r}, {model!r}, {str(tmp_path / 'run')!r}\n{FAULTS}")
    output = run(tmp_path / "run", f"actor_rollout_ref.model.external_lib={faults}")
    assert f"starting again as the run began, without a checkpoint, with {KEYS[call]}=" in output
    assert f"train worker.{method}: the process of train-1 died" in output and "(restarts left: 0)" in output
    ended = weights_and_moments(tmp_path / "run", 2)
    gaps = {name: float((undisturbed[name] - ended[name]).abs().max()) for name in ended if "exp_avg" not in name}
    assert max(gaps.values()) < 1e-6
